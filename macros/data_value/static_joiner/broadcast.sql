{#- Static Joiner, the reference's size: whether the join copies the reference to every executor. -#}

{% macro _static_joiner_hint(join, broadcast_max_mb) %}
    {#-
        A hint to copy the reference to every executor, if Spark's estimate of what the join reads of it is small enough.
        A table that doesn't exist yet has no size: a model compiles without tables.
    -#}
    {%- if broadcast_max_mb is none -%}
        {{ return('') }}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._is_finite(broadcast_max_mb) and broadcast_max_mb > 0,
        "broadcast_max_mb must be a number above 0, got '" ~ broadcast_max_mb ~ "'"
    ) -%}
    {%- do lakehouse_patterns.require(
        join.reference is not string,
        "broadcast_max_mb needs the reference as ref() or source(), whose size it reads, got '" ~ join.reference ~ "'"
    ) -%}
    {%- if not execute or load_relation(join.reference) is none -%}
        {{ return('') }}
    {%- endif -%}
    {%- set rows = lakehouse_patterns._static_joiner_rows_sql(join, join.reference, join.effective_to) -%}
    {%- set megabytes = lakehouse_patterns._estimated_bytes(rows) / 1000000 -%}
    {%- if megabytes <= broadcast_max_mb -%}
        {{ return('/*+ broadcast(versions) */') }}
    {%- endif -%}
    {%- do log(
        'lakehouse_patterns: static_joiner does not broadcast ' ~ join.reference ~ ', which has ' ~ '%.3g' % megabytes
        ~ ' MB by the estimate of Spark, more than the ' ~ broadcast_max_mb ~ ' MB of broadcast_max_mb',
        info=true
    ) -%}
    {{ return('') }}
{% endmacro %}


{% macro _estimated_bytes(sql) %}
    {#- What Spark's optimizer estimates of the result of a query, which isn't run. -#}
    {%- set plan = run_query('explain cost ' ~ sql).rows[0][0] -%}
    {%- set found = modules.re.search('sizeInBytes=([0-9.]+(?:E[+]?[0-9]+)?) ([KMGTPE]i)?B', plan) -%}
    {%- set power = 'KMGTPE'.find(found[2][0]) + 1 if found[2] else 0 -%}
    {{ return(found[1] | float * 1024 ** power) }}
{% endmacro %}
