{#-
    Late Data Detector in SQL: the delay of a relation's rows, from event time to arrival time.

    A row's delay is its arrival time minus its event time; a negative delay (a device whose clock is fast) counts as 0.
    Buckets are given by their upper bounds: a delay equal to a bound belongs to the bucket that the bound ends. Every
    bucket is in the result, an empty one with 0 rows, so that a monitor sees a number that fell to 0. A row without
    event time or arrival time has no delay and is counted as `unknown`.
-#}

{% macro lateness_report(relation, event_time, arrived_at, buckets, by=none) %}
    {{ return(adapter.dispatch('lateness_report', 'lakehouse_patterns')(
        relation, event_time, arrived_at, buckets, by
    )) }}
{% endmacro %}

{% macro default__lateness_report(relation, event_time, arrived_at, buckets, by) %}
    {%- set groups = lakehouse_patterns.as_list(by) -%}
    {%- set own = ['bucket', 'delay_up_to', 'row_count', 'max_delay_seconds'] -%}
    {%- for name in groups -%}
        {%- do lakehouse_patterns.require(
            name | lower not in own,
            "by can't take '" ~ name ~ "', which is a column of the report; rename it in a query first"
        ) -%}
    {%- endfor -%}
    {%- set groups = lakehouse_patterns.quoted_names(groups) -%}
    {%- set bounds = lakehouse_patterns._bucket_seconds(buckets) -%}
    {%- set last = bounds | length -%}
with delays as (
    select
        {%- for name in groups %}
        {{ name }},
        {%- endfor %}
        {{ lakehouse_patterns._delay_seconds(event_time, arrived_at) }} as lakehouse_patterns_delay
    from {{ relation }}
),

bucketed as (
    select
        {%- for name in groups %}
        {{ name }},
        {%- endfor %}
        case
            when lakehouse_patterns_delay is null then {{ last + 1 }}
            {%- for seconds in bounds %}
            when lakehouse_patterns_delay <= {{ seconds }} then {{ loop.index0 }}
            {%- endfor %}
            else {{ last }}
        end as lakehouse_patterns_bucket,
        lakehouse_patterns_delay
    from delays
),

counted as (
    select
        {%- for name in groups %}
        {{ name }},
        {%- endfor %}
        {%- for position in range(last + 2) %}
        count_if(lakehouse_patterns_bucket = {{ position }}) as lakehouse_patterns_rows_{{ position }},
        max(case when lakehouse_patterns_bucket = {{ position }} then lakehouse_patterns_delay end)
            as lakehouse_patterns_delay_{{ position }}{{ ',' if not loop.last }}
        {%- endfor %}
    from bucketed
    {%- if groups %}
    group by {{ groups | join(', ') }}
    {%- endif %}
)

select
    {%- for name in groups %}
    {{ name }},
    {%- endfor %}
    stack(
        {{ last + 2 }},
        {%- for position in range(last + 2) %}
        {%- set name = (buckets[position] if position < last else 'more' if position == last else 'unknown') %}
        {{ position }}, '{{ name }}', lakehouse_patterns_rows_{{ position }}, lakehouse_patterns_delay_{{ position }}
        {{- ',' if not loop.last }}
        {%- endfor %}
    ) as (bucket, delay_up_to, row_count, max_delay_seconds)
from counted
{%- endmacro %}

{% macro recommended_watermark_delay(relation, event_time, arrived_at, percentile=0.99, factor=2) %}
    {{ return(adapter.dispatch('recommended_watermark_delay', 'lakehouse_patterns')(
        relation, event_time, arrived_at, percentile, factor
    )) }}
{% endmacro %}

{% macro default__recommended_watermark_delay(relation, event_time, arrived_at, percentile, factor) %}
    {#- The delay with which nearly all rows are on time, from the measured delays: p99 = 5 minutes -> 10 minutes. -#}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._is_finite(percentile) and 0 < percentile < 1,
        'percentile must be a number between 0 and 1, got ' ~ percentile
    ) -%}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._is_finite(factor) and factor >= 1, 'factor must be a number of at least 1, got ' ~ factor
    ) -%}
select
    count(delay_seconds) as measured_rows,
    percentile(delay_seconds, {{ percentile }}) as percentile_seconds,
    ceil(percentile(delay_seconds, {{ percentile }}) * {{ factor }}) as delay_seconds
from (
    select {{ lakehouse_patterns._delay_seconds(event_time, arrived_at) }} as delay_seconds
    from {{ relation }}
)
{%- endmacro %}

{% macro _delay_seconds(event_time, arrived_at) %}
    {%- set micros = 'unix_micros(' ~ arrived_at ~ ') - unix_micros(' ~ event_time ~ ')' -%}
    {#- Not greatest(0, ...): it ignores NULL, so a row without one of the times would get the delay 0. -#}
    {{ return('if(' ~ micros ~ ' < 0, 0, ' ~ micros ~ ') / 1000000') }}
{% endmacro %}

{% macro _bucket_seconds(buckets) %}
    {%- do lakehouse_patterns.require(
        buckets is sequence and buckets is not string and buckets | length > 0,
        "buckets must be a list of delays such as ['0 minutes', '5 minutes', '1 hour'], got " ~ buckets
    ) -%}
    {%- set bounds = [] -%}
    {%- for bucket in buckets -%}
        {%- set seconds = lakehouse_patterns._duration('a bucket', bucket).total_seconds() | int -%}
        {%- do lakehouse_patterns.require(
            not bounds or seconds > bounds[-1], 'buckets must be in ascending order, got ' ~ buckets | join(', ')
        ) -%}
        {%- do bounds.append(seconds) -%}
    {%- endfor -%}
    {{ return(bounds) }}
{% endmacro %}
