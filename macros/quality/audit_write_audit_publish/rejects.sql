{#- Audit-Write-Audit-Publish: `<model>__rejects`, the rows that dispatching audits keep from readers. -#}

{% macro _awap_rejects_columns() %}
    {#- Added to the model's columns. Filter Interceptor's flagged tables have a `rejected_by` of their own. -#}
    {{ return({'lakehouse_patterns_run': 'string', 'lakehouse_patterns_rejected_by': 'array<string>'}) }}
{% endmacro %}


{% macro _awap_require_free_names(types) %}
    {%- do lakehouse_patterns.require_free_names(
        types, lakehouse_patterns._awap_rejects_columns(), 'the table of rejected rows'
    ) -%}
{% endmacro %}


{% macro _awap_write_rejects(options, scope, findings) %}
    {%- if options.dispatches and (findings.periods or not scope.target) -%}
        {%- set rejects = lakehouse_patterns._awap_companion(
            '__rejects', lakehouse_patterns._awap_rejects_columns()
        ) -%}
        {%- set stored = lakehouse_patterns.column_types(rejects) -%}
        {%- set types = dict(scope.types, **lakehouse_patterns._awap_rejects_columns()) -%}
        {%- set replaces_periods = scope.target is not none and stored -%}
        {%- if replaces_periods -%}
            {%- set stored = lakehouse_patterns.add_columns(
                rejects, stored, lakehouse_patterns.schema_differences(stored, types).added
            ) -%}
        {%- endif -%}
        {%- call statement('write_rejects') -%}
            {%- if replaces_periods -%}
            insert into {{ rejects }} by name
            replace where {{ lakehouse_patterns._awap_condition(scope, findings.periods) }}
            select {{ lakehouse_patterns.selected_by_name(stored, types) | join(', ') }}
            {%- else -%}
            create or replace table {{ rejects }}
            {{ lakehouse_patterns._awap_clauses(types, {}) }}
            {{ lakehouse_patterns._awap_location(rejects) }}
            as
            select *
            {%- endif %}
            from ({{ lakehouse_patterns._awap_judged_rows(scope, findings) }})
            {#- If the audit found no rejects, no second scan is needed. #}
            where {{ 'size(lakehouse_patterns_rejected_by) > 0' if findings.has_rejects else 'false' }}
        {%- endcall -%}
    {%- endif -%}
{% endmacro %}


{% macro _awap_judged_rows(scope, findings) %}
    {#- The staged rows with the names of the dispatching audits that reject them: the row's own, then its period's. -#}
    {%- set alias = 'lakehouse_patterns_staged' -%}
select
    {{ alias }}.* except (lakehouse_patterns_rejected_by),
    {{ lakehouse_patterns._awap_run_sql(scope, alias) }} as lakehouse_patterns_run,
    array_distinct(concat(
        {{ alias }}.lakehouse_patterns_rejected_by,
        case
            {%- for run, names in findings.rejected.items() %}
            when {{ alias ~ '.' ~ scope.period ~ ' = ' ~ lakehouse_patterns.typed_literal(run, scope.type)
                    if scope.period else 'true' }} then array({{ lakehouse_patterns.text_literals(names) }})
            {%- endfor %}
            when false then array('')
            else array_compact(array(cast(null as string)))
        end
    )) as lakehouse_patterns_rejected_by
from {{ scope.rows }} as {{ alias }}
{% endmacro %}
