{#- Audit-Write-Audit-Publish: the published table, in one commit or none. -#}

{% macro _awap_publish(options, scope, findings) %}
    {#- Returns whether the whole table was replaced. -#}
    {%- set accepted = findings.periods | reject('in', findings.rejected) | list -%}
    {%- set keeps_published = scope.existing is not none and scope.existing.is_delta and not should_full_refresh() -%}
    {%- if not accepted and keeps_published -%}
        {%- call noop_statement('main', 'NOTHING TO PUBLISH') -%}{%- endcall -%}
        {{ return(false) }}
    {%- endif -%}

    {%- set rows -%}
        {%- if findings.has_rejects -%}
from ({{ lakehouse_patterns._awap_judged_rows(scope, findings) }})
where size(lakehouse_patterns_rejected_by) = 0
        {%- else -%}
from {{ scope.rows }}
        {%- endif -%}
    {%- endset -%}
    {%- if scope.target -%}
        {%- set stored = lakehouse_patterns.add_columns(scope.target, scope.stored, scope.added) -%}
        {%- call statement('main') -%}
            insert into {{ scope.target }} by name
            replace where {{ lakehouse_patterns._awap_condition(scope, accepted, findings.rejected.keys() | list) }}
            select {{ lakehouse_patterns.selected_by_name(stored, scope.types) | join(', ') }}
            {{ rows }}
        {%- endcall -%}
        {{ return(false) }}
    {%- endif -%}

    {%- do lakehouse_patterns.drop_other_relation(scope.existing) -%}
    {%- set columns = lakehouse_patterns.quoted_names(scope.types) | join(', ') -%}
    {%- call statement('main') -%}
        {{ create_table_as(false, this, 'select ' ~ columns ~ '\n' ~ rows) }}
    {%- endcall -%}
    {%- do lakehouse_patterns.persist_table_constraints(this) -%}
    {{ return(true) }}
{% endmacro %}


{% macro _awap_condition(scope, periods, except=[]) %}
    {#- The rows of some periods: all of `[from, to)` except some where an interval is given, else those listed. -#}
    {%- set listed = [] -%}
    {%- for run in (except if scope.interval else periods) -%}
        {%- do listed.append(lakehouse_patterns.typed_literal(run, scope.type)) -%}
    {%- endfor -%}
    {%- if scope.interval -%}
{{ scope.interval }}{{ ' and ' ~ scope.period ~ ' not in (' ~ (listed | join(', ')) ~ ')' if listed }}
    {%- else -%}
{{ scope.period }} in ({{ listed | join(', ') }})
    {%- endif -%}
{% endmacro %}
