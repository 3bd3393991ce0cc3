{#-
    Distributed Aggregator, the cube: statistics by day and by ISO week on every combination of some dimensions.

    A NULL in a dimension of a cube has two meanings: the rows without a value, and all rows. `grouping_id` tells which.
    Its bits are the dimensions in their order, the last one in the lowest bit, and a bit is set where the dimension is
    added up: with two dimensions 0 is a cell, 1 all values of the second, 2 all values of the first, 3 all rows.

    The rows are aggregated to the cells first, and only cells are copied to each level and added up. The weeks are merged
    from the days' counts and sums; an average of the days' averages would weigh a day with one row as much as another.
-#}

{% macro cube_daily(relation, day, dimensions, measures=none, where=none) %}
    {{ return(adapter.dispatch('cube_daily', 'lakehouse_patterns')(relation, day, dimensions, measures, where)) }}
{% endmacro %}

{% macro default__cube_daily(relation, day, dimensions, measures, where) %}
    {%- set dimensions = lakehouse_patterns._dimensions('cube_daily', dimensions) -%}
    {%- set measures = lakehouse_patterns._measures(measures) -%}
    {%- do lakehouse_patterns._require_names('cube_daily', [day] + dimensions + ['grouping_id'], measures) -%}
    {%- set names = lakehouse_patterns.quoted_names(dimensions) -%}
    {%- set quoted_day = lakehouse_patterns.quoted_name(day) -%}
select
    {{ quoted_day }},
    {{ names | join(', ') }},
    lakehouse_patterns_grouping_id as grouping_id,
    {{ lakehouse_patterns._named_parts(measures) }}
from (
    select
        {{ quoted_day }},
        {{ names | join(', ') }},
        grouping_id() as lakehouse_patterns_grouping_id,
        {{ lakehouse_patterns._merged_parts(measures) }}
    from (
        select
            {{ quoted_day }},
            {{ names | join(', ') }},
            {{ lakehouse_patterns._first_parts(measures) }}
        from (
            {{ lakehouse_patterns._measured_rows(
                relation, [lakehouse_patterns._required_day(quoted_day, day)] + names, measures, where
            ) }}
        )
        group by {{ quoted_day }}, {{ names | join(', ') }}
    )
    group by {{ quoted_day }}, cube ({{ names | join(', ') }})
)
{%- endmacro %}


{% macro cube_weekly(daily, day, dimensions, measures=none, where=none) %}
    {{ return(adapter.dispatch('cube_weekly', 'lakehouse_patterns')(daily, day, dimensions, measures, where)) }}
{% endmacro %}

{% macro default__cube_weekly(daily, day, dimensions, measures, where) %}
    {%- set dimensions = lakehouse_patterns._dimensions('cube_weekly', dimensions) -%}
    {%- set measures = lakehouse_patterns._measures(measures) -%}
    {%- do lakehouse_patterns._require_names(
        'cube_weekly', ['week_start', day] + dimensions + ['grouping_id'], measures
    ) -%}
    {%- set names = lakehouse_patterns.quoted_names(dimensions) -%}
select
    week_start,
    {{ names | join(', ') }},
    lakehouse_patterns_grouping_id as grouping_id,
    {{ lakehouse_patterns._named_parts(measures) }}
from (
    select
        week_start,
        {{ names | join(', ') }},
        lakehouse_patterns_grouping_id,
        {{ lakehouse_patterns._merged_parts(measures) }}
    from (
        select
            trunc({{ lakehouse_patterns.quoted_name(day) }}, 'WEEK') as week_start,
            {{ names | join(', ') }},
            {{ lakehouse_patterns._same_grouping_id(dimensions) }} as lakehouse_patterns_grouping_id,
            {{ lakehouse_patterns._stored_parts(measures) }}
        from {{ daily }}
    )
    {%- if where %}
    where {{ where }}
    {%- endif %}
    group by week_start, {{ names | join(', ') }}, lakehouse_patterns_grouping_id
)
{%- endmacro %}


{% macro _dimensions(macro_name, dimensions) %}
    {%- set dimensions = lakehouse_patterns.as_list(dimensions) -%}
    {%- do lakehouse_patterns.require(
        1 <= dimensions | length <= 10,
        macro_name ~ ' needs 1 to 10 dimensions, got ' ~ dimensions | length
        ~ '; a cube has 2 to the power of their number levels'
    ) -%}
    {{ return(dimensions) }}
{% endmacro %}


{% macro _required_day(quoted_day, name) %}
    {#- A row without a day would be in the cube of no day. The day of a timestamp depends on a zone, which is not ours. -#}
    {%- set message = "lakehouse_patterns: the day '" ~ name ~ "' must be a date" -%}
    {{ return(lakehouse_patterns._required_type(quoted_day, ['date'], message) ~ ' as ' ~ quoted_day) }}
{% endmacro %}


{% macro _same_grouping_id(dimensions) %}
    {#- The stored id; a cube of other dimensions, or of these in another order, has a value where the id says "all". -#}
    {%- set wrong = ['grouping_id >= ' ~ 2 ** (dimensions | length)] -%}
    {%- for name in dimensions -%}
        {%- do wrong.append(
            'grouping_id & ' ~ 2 ** loop.revindex0 ~ ' <> 0 and ' ~ lakehouse_patterns.quoted_name(name)
            ~ ' is not null'
        ) -%}
    {%- endfor -%}
    {{ return(
        'case when ' ~ wrong | join(' or ') ~ ' then raise_error(' ~ lakehouse_patterns.text_literal(
            'lakehouse_patterns: cube_weekly needs the dimensions of the daily cube in their order, got '
            ~ dimensions | join(', ')
        ) ~ ') else grouping_id end'
    ) }}
{% endmacro %}
