{#-
    Windowed Aggregation: the same measures by tumbling or sliding windows of event time.

    Windows begin at multiples of their slide since 1970-01-01 00:00 UTC plus `offset`, so the hours and days of a zone
    with another offset need one.
-#}

{% macro windowed_aggregate(relation, event_time, window, measures=none, by=none, slide=none, offset=none) %}
    {{ return(adapter.dispatch('windowed_aggregate', 'lakehouse_patterns')(
        relation, event_time, window, measures, by, slide, offset
    )) }}
{% endmacro %}

{% macro default__windowed_aggregate(relation, event_time, window, measures, by, slide, offset) %}
    {%- set measures = lakehouse_patterns._measures(measures) -%}
    {%- set keys = lakehouse_patterns.as_list(by) -%}
    {%- do lakehouse_patterns._require_names(
        'windowed_aggregate', ['window_start', 'window_end'] + keys, measures
    ) -%}
    {%- set slide = slide or window -%}
    {%- set offset = offset or '0 minutes' -%}
    {%- set length = lakehouse_patterns._duration('window', window) -%}
    {%- set step = lakehouse_patterns._duration('slide', slide) -%}
    {%- do lakehouse_patterns.require(
        length.total_seconds() > 0, "window must be longer than 0, got '" ~ window ~ "'"
    ) -%}
    {%- do lakehouse_patterns.require(
        0 < step.total_seconds() and step <= length,
        "slide must be longer than 0 and at most the window '" ~ window ~ "', or events would be in no window, got '"
        ~ slide ~ "'"
    ) -%}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._duration('offset', offset) < step,
        "offset must be shorter than the slide '" ~ slide ~ "', got '" ~ offset ~ "'"
    ) -%}
    {%- set names = lakehouse_patterns.quoted_names(keys) -%}
    {%- set windows = "window(lakehouse_patterns_time, '" ~ window ~ "', '" ~ slide ~ "', '" ~ offset ~ "')" -%}
select
    lakehouse_patterns_window.start as window_start,
    lakehouse_patterns_window.end as window_end,
    {%- for name in names %}
    {{ name }},
    {%- endfor %}
    {{ lakehouse_patterns._named_parts(measures) }}
from (
    select
        {{ windows }} as lakehouse_patterns_window,
        {%- for name in names %}
        {{ name }},
        {%- endfor %}
        {{ lakehouse_patterns._first_parts(measures) }}
    from (
        {{ lakehouse_patterns._measured_rows(
            relation, [lakehouse_patterns._required_time(event_time)] + names, measures
        ) }}
    )
    group by {{ ([windows] + names) | join(', ') }}
)
{%- endmacro %}


{% macro _required_time(event_time) %}
    {#- Spark would complete a text such as 10:00 to a time of today, and leave an event without time out of all windows. -#}
    {{ return(lakehouse_patterns._required_type(
        event_time, ['timestamp', 'timestamp_ntz'],
        "lakehouse_patterns: event_time '" ~ event_time ~ "' must be a timestamp"
    ) ~ ' as lakehouse_patterns_time') }}
{% endmacro %}
