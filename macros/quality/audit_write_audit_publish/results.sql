{#- Audit-Write-Audit-Publish: `<model>__audit_results`, what was measured of the published periods. -#}

{% macro _awap_results_columns() %}
    {#- `format_version` is raised whenever the columns change their meaning. -#}
    {{ return({
        'dataset': 'string',
        'run': 'string',
        'audit': 'string',
        'column_name': 'string',
        'issue': 'string',
        'value': 'double',
        'measured': 'double',
        'threshold': 'string',
        'outcome': 'string',
        'severity': 'string',
        'audited_at': 'timestamp',
        'format_version': 'int',
    }) }}
{% endmacro %}


{% macro _awap_results() %}
    {%- set definitions = [] -%}
    {%- for name, type in lakehouse_patterns._awap_results_columns().items() -%}
        {%- do definitions.append(name ~ ' ' ~ type) -%}
    {%- endfor -%}
    {{ return(lakehouse_patterns._awap_companion('__audit_results', definitions)) }}
{% endmacro %}


{% macro _awap_write_results(options, scope, findings) %}
    {#- A run that replaces the whole table of a model with periods forgets the periods before. -#}
    {%- set listed = findings.results | map(attribute='run') | unique | list + findings.deleted -%}
    {%- set replaced = 'true' if options.period and not scope.target
        else 'run in (' ~ lakehouse_patterns.text_literals(listed) ~ ')' if listed -%}
    {%- if findings.results -%}
        {%- call statement('write_results') -%}
            insert into {{ scope.results }}
            replace where {{ replaced }}
            {{ lakehouse_patterns._awap_results_sql(findings.results) }}
        {%- endcall -%}
    {%- elif replaced -%}
        {%- do run_query('delete from ' ~ scope.results ~ ' where ' ~ replaced) -%}
    {%- endif -%}
{% endmacro %}


{% macro _awap_results_sql(results) %}
    {#- One row a period and audit. -#}
    {%- set names = ['run', 'audit', 'column_name', 'issue', 'value', 'measured', 'threshold', 'outcome', 'severity'] -%}
select
    {%- for name, type in lakehouse_patterns._awap_results_columns().items() %}
    {%- if name == 'dataset' %}
    {{ lakehouse_patterns.text_literal(this.schema ~ '.' ~ this.identifier) }} as dataset,
    {%- elif name == 'audited_at' %}
    timestamp '{{ run_started_at.strftime("%Y-%m-%d %H:%M:%S.%f") }}' as audited_at,
    {%- elif name == 'format_version' %}
    1 as format_version
    {%- else %}
    try_cast({{ name }} as {{ type }}) as {{ name }},
    {%- endif %}
    {%- endfor %}
from values
    {%- for result in results %}
    (
        {%- for name in names %}
        {{ 'null' if result[name] is none else lakehouse_patterns.text_literal(result[name]) }}{{ ',' if not loop.last }}
        {%- endfor %}
    ){{ ',' if not loop.last }}
    {%- endfor %}
    as result ({{ names | join(', ') }})
{%- endmacro %}


{% macro _awap_companion(suffix, definitions=[]) %}
    {#-
        A companion table of the model. No node declares it: if dbt's cache lacks it, it is created here, or registered
        again from its path after the metastore was lost.
    -#}
    {%- set relation = lakehouse_patterns.relation_beside(this, suffix) -%}
    {%- if load_relation(relation) is none -%}
        {%- do run_query(
            'create table if not exists ' ~ relation ~ (' (' ~ (definitions | join(', ')) ~ ')' if definitions else '')
            ~ ' using delta ' ~ lakehouse_patterns._awap_location(relation)
        ) -%}
    {%- endif -%}
    {{ return(relation) }}
{% endmacro %}


{% macro _awap_location(relation) %}
    {%- if config.get('location_root') -%}
location {{ lakehouse_patterns.text_literal(config.get('location_root') ~ '/' ~ relation.identifier) }}
    {%- endif -%}
{% endmacro %}
