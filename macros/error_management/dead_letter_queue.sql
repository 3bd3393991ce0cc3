{#-
    Dead-Letter monitoring in SQL: statistics of a dead-letter table, and limits whose excess is an alert.

    The macros read any table with `processed_at`, `error_class`, `status` and `attempts`, such as the table that the
    job dead_letter.py writes. A dead letter is open while its status is pending or parked.
-#}

{% macro dead_letter_statistics(dead_letter, days=30, now=none) %}
    {{ return(adapter.dispatch('dead_letter_statistics', 'lakehouse_patterns')(dead_letter, days, now)) }}
{% endmacro %}

{% macro default__dead_letter_statistics(dead_letter, days, now) -%}
    {%- do lakehouse_patterns.require(
        days is integer and days > 0, 'days must be a number of days above 0, got ' ~ days
    ) -%}
select
    {{ lakehouse_patterns._utc_date('processed_at') }} as day,
    error_class,
    count(*) as letters,
    count_if(status in ('pending', 'parked')) as open_letters,
    min(processed_at) as oldest,
    max(processed_at) as newest,
    avg(attempts) as mean_attempts
from {{ dead_letter }}
where
    {#- Not minus an interval: a day of the session's zone may have 23 hours. #}
    processed_at >= timestamp_micros(
        unix_micros({{ lakehouse_patterns._given_or_run_start('now', now) }}) - {{ days * 86400000000 }}
    )
group by {{ lakehouse_patterns._utc_date('processed_at') }}, error_class
{%- endmacro %}

{% test dead_letter_queue(model, max_open=none, max_age_hours=none, max_per_day=none) %}
    {{ lakehouse_patterns.dead_letter_queue_failures(model, max_open, max_age_hours, max_per_day) }}
{% endtest %}

{% macro dead_letter_queue_failures(dead_letter, max_open=none, max_age_hours=none, max_per_day=none, now=none) %}
    {{ return(adapter.dispatch('dead_letter_queue_failures', 'lakehouse_patterns')(
        dead_letter, max_open, max_age_hours, max_per_day, now
    )) }}
{% endmacro %}

{% macro default__dead_letter_queue_failures(dead_letter, max_open, max_age_hours, max_per_day, now) -%}
    {%- set limits = {} -%}
    {%- for name, value in {
        'max_open': max_open, 'max_age_hours': max_age_hours, 'max_per_day': max_per_day
    }.items() if value is not none -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns._is_finite(value) and value >= 0, name ~ ' must be a number from 0 on, got ' ~ value
        ) -%}
        {%- do limits.update({name: value}) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        limits, 'dead_letter_queue needs a limit: max_open, max_age_hours or max_per_day'
    ) -%}
    {%- set moment = lakehouse_patterns._given_or_run_start('now', now) -%}
select
    limit_name,
    got,
    allowed
from (
    select
        stack(
            {{ limits | length }},
            {%- for name, value in limits.items() %}
            {%- set measure = name | replace('max_', '') %}
            '{{ name }}', try_cast({{ measure }} as double), try_cast({{ value }} as double){{ ',' if not loop.last }}
            {%- endfor %}
        ) as (limit_name, got, allowed)
    from (
        select
            count_if(status in ('pending', 'parked')) as open,
            (
                unix_micros({{ moment }})
                - unix_micros(min(case when status in ('pending', 'parked') then processed_at end))
            ) / 3600000000 as age_hours,
            count_if(
                {{ lakehouse_patterns._utc_date('processed_at') }} = {{ lakehouse_patterns._utc_date(moment) }}
            ) as per_day
        from {{ dead_letter }}
    )
)
where got > allowed
{%- endmacro %}
