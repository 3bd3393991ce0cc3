{#-
    Time Travel: a relation as it was. A name is looked up when the model is compiled, in the registry that
    python_jobs/idempotency/time_travel.py writes and keeps from VACUUM.
-#}

{% macro time_travel(relation, version=none, timestamp=none, name=none, registry=none) %}
    {{ return(adapter.dispatch('time_travel', 'lakehouse_patterns')(relation, version, timestamp, name, registry)) }}
{% endmacro %}

{% macro default__time_travel(relation, version, timestamp, name, registry) %}
    {%- set given = [version, timestamp, name] | reject('none') | list -%}
    {%- do lakehouse_patterns.require(
        given | length == 1, 'time_travel needs one of version, timestamp and name, got ' ~ (given | length)
    ) -%}
    {%- do lakehouse_patterns.require(
        (name is none) == (registry is none), 'time_travel needs name and registry together'
    ) -%}
    {%- if version is not none -%}
        {%- do lakehouse_patterns.require(
            version is integer and version >= 0, "version must be a number from 0 on, got '" ~ version ~ "'"
        ) -%}
        {{ return(lakehouse_patterns._time_travel_rows(relation, 'version as of ' ~ version)) }}
    {%- elif timestamp is not none -%}
        {%- set moment = lakehouse_patterns._moment('timestamp', timestamp) -%}
        {{ return(lakehouse_patterns._time_travel_rows(
            relation, 'timestamp as of ' ~ lakehouse_patterns.timestamp_literal(moment)
        )) }}
    {%- elif not execute -%}
        {{ return(relation | string) }}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        modules.re.fullmatch('[\\w.-]+', name), "name may hold letters, digits, '.', '_' and '-', got '" ~ name ~ "'"
    ) -%}
    {%- set table_id = lakehouse_patterns.table_detail(relation)['id'] -%}
    {%- set found = run_query(lakehouse_patterns._time_travel_sql(registry, table_id, name)).rows -%}
    {%- do lakehouse_patterns.require(
        found | length == 1, relation ~ ' has no version named ' ~ name ~ ' in ' ~ registry
    ) -%}
    {{ return(lakehouse_patterns._time_travel_rows(relation, 'version as of ' ~ found[0]['version'])) }}
{% endmacro %}


{% macro _time_travel_rows(relation, moment) %}
    {#- With `--empty`, with `--sample` and in a microbatch a subquery, as dbt makes one of a relation. -#}
    {%- set rows = lakehouse_patterns.unlimited(relation) ~ ' ' ~ moment -%}
    {%- if relation is string -%}
        {{ return(rows) }}
    {%- endif -%}
    {%- if relation.limit is not none -%}
        {%- set rows = '(select * from ' ~ rows ~ ' limit ' ~ relation.limit ~ ')' -%}
    {%- endif -%}
    {{ return(relation.render_event_time_filtered(rows) if relation.event_time_filter else rows) }}
{% endmacro %}


{% macro _time_travel_sql(registry, table_id, name) %}
    select version
    from {{ lakehouse_patterns.unlimited(registry) }}
    where table_id = {{ lakehouse_patterns.text_literal(table_id) }} and name = {{ lakehouse_patterns.text_literal(name) }}
{%- endmacro %}
