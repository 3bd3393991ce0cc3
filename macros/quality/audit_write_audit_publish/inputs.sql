{#- Audit-Write-Audit-Publish: audit 1, of the model's inputs, from metadata and before anything is staged. -#}

{% macro _awap_audit_inputs(input_audits) %}
    {%- set problems, inputs = [], lakehouse_patterns._awap_inputs() -%}
    {%- for audit in input_audits -%}
        {%- do lakehouse_patterns.require_known_keys(
            'input audit', audit, ['input', 'min_rows', 'min_bytes', 'columns']
        ) -%}
        {%- do lakehouse_patterns.require_one_of('input of an input audit', audit.get('input'), inputs.keys() | list) -%}
        {%- for option in ['min_rows', 'min_bytes'] if audit.get(option) is not none -%}
            {%- do lakehouse_patterns._awap_require_bound(
                option ~ " of the input audit of '" ~ audit.input ~ "'", audit[option], 'input'
            ) -%}
        {%- endfor -%}
        {%- set relation = load_relation(lakehouse_patterns._awap_input(inputs[audit.input])) -%}
        {%- if relation is none -%}
            {%- do problems.append(audit.input ~ ' does not exist') -%}
        {%- else -%}
            {%- do problems.extend(lakehouse_patterns._awap_input_problems(audit, relation)) -%}
        {%- endif -%}
    {%- endfor -%}
    {%- if problems -%}
        {%- do exceptions.raise_compiler_error(
            'lakehouse_patterns: ' ~ this ~ ' was not built, its input failed ' ~ (problems | length)
            ~ ' audits. ' ~ (problems | join('. '))
        ) -%}
    {%- endif -%}
{% endmacro %}


{% macro _awap_inputs() %}
    {#- {name: how the model refers to it}, of its refs and sources. -#}
    {%- set inputs = {} -%}
    {%- for reference in model.refs -%}
        {%- do inputs.update({reference.name: reference}) -%}
    {%- endfor -%}
    {%- for reference in model.sources -%}
        {%- do inputs.update({reference[1]: reference}) -%}
    {%- endfor -%}
    {{ return(inputs) }}
{% endmacro %}


{% macro _awap_input(reference) %}
    {#- `ref` knows what `--defer` puts in a model's place; the graph's nodes don't. -#}
    {%- if reference is mapping -%}
        {%- set names = [reference.package, reference.name] if reference.get('package') else [reference.name] -%}
        {{ return(ref(*names, v=reference.get('version'))) }}
    {%- endif -%}
    {{ return(source(*reference)) }}
{% endmacro %}


{% macro _awap_input_problems(audit, relation) %}
    {%- set problems = [] -%}
    {%- if audit.get('min_bytes') is not none -%}
        {%- do lakehouse_patterns.require(
            not relation.is_view, 'min_bytes of an input audit needs a table, ' ~ relation ~ ' is a view'
        ) -%}
        {%- set size = lakehouse_patterns.table_detail(relation)['sizeInBytes'] -%}
        {%- if size < audit.min_bytes -%}
            {%- do problems.append(audit.input ~ ' has ' ~ size ~ ' bytes, allowed at least ' ~ audit.min_bytes) -%}
        {%- endif -%}
    {%- endif -%}
    {%- if audit.get('min_rows') is not none -%}
        {#- Delta answers a bare count from its log. -#}
        {%- set row_count = run_query('select count(*) from ' ~ relation).rows[0][0] -%}
        {%- if row_count < audit.min_rows -%}
            {%- do problems.append(audit.input ~ ' has ' ~ row_count ~ ' rows, allowed at least ' ~ audit.min_rows) -%}
        {%- endif -%}
    {%- endif -%}
    {%- if audit.get('columns') -%}
        {%- set absent = lakehouse_patterns.names_without_case(
            audit.columns, lakehouse_patterns.column_types(relation)
        ) -%}
        {%- if absent -%}
            {%- do problems.append(audit.input ~ ' lacks the columns ' ~ (absent | join(', '))) -%}
        {%- endif -%}
    {%- endif -%}
    {{ return(problems) }}
{% endmacro %}
