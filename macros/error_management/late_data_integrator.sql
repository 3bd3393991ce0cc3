{#-
    Static Late Data Integrator in dbt: `incremental_strategy='microbatch'` with `lookback` replaces the partitions of
    the last days in each run, oldest first. Two things it doesn't do are here:

    - it overwrites the partitions that the query returns rows for, so a date that lost all its rows keeps the old
      ones: `clear_vanished_dates`, as a post-hook, removes them;
    - with `--event-time-start` it ignores `lookback`: a backfill has to name the first date of the lookback itself,
      `lookback_dates(date, days)[0]`.
-#}

{% macro lookback_dates(date, days) %}
    {{ return(adapter.dispatch('lookback_dates', 'lakehouse_patterns')(date, days)) }}
{% endmacro %}

{% macro default__lookback_dates(date, days) %}
    {#- The dates before `date`, in order, as texts. -#}
    {%- do lakehouse_patterns.require(
        modules.re.fullmatch('\\d{4}-\\d{2}-\\d{2}', date | string),
        "date must be a date such as 2024-12-31, got '" ~ date ~ "'"
    ) -%}
    {%- do lakehouse_patterns._require_days(days) -%}
    {%- set last = modules.datetime.date.fromisoformat(date | string) -%}
    {%- set dates = [] -%}
    {%- for back in range(days, 0, -1) -%}
        {%- do dates.append((last - modules.datetime.timedelta(days=back)).isoformat()) -%}
    {%- endfor -%}
    {{ return(dates) }}
{% endmacro %}

{% macro clear_vanished_dates(relation, column, days) %}
    {{ return(adapter.dispatch('clear_vanished_dates', 'lakehouse_patterns')(relation, column, days)) }}
{% endmacro %}

{% macro default__clear_vanished_dates(relation, column, days) %}
    {#- A statement that deletes the last dates of this model that `relation` has no row of any more; '' if none. -#}
    {%- if not execute -%}
        {{ return('') }}
    {%- endif -%}
    {%- do lakehouse_patterns._require_days(days) -%}
    {%- set column = adapter.quote(column) -%}
    {#- Rendered here: as a text, a relation in a microbatch model is cut down to the rows of the batch. -#}
    {%- set relation = relation.render() -%}
    {%- set vanished = run_query(
        'select distinct cast(' ~ column ~ ' as string) as vanished from ' ~ this
        ~ ' where ' ~ column ~ ' >= date_sub(current_date(), ' ~ days ~ ') and ' ~ column
        ~ ' not in (select ' ~ column ~ ' from ' ~ relation ~ ' where ' ~ column ~ ' >= date_sub(current_date(), '
        ~ days ~ ')) order by vanished'
    ).columns[0].values() -%}
    {%- if not vanished -%}
        {{ return('') }}
    {%- endif -%}
    {{ return('delete from ' ~ this ~ ' where ' ~ column ~ " in ('" ~ vanished | join("', '") ~ "')") }}
{% endmacro %}

{% macro _require_days(days) %}
    {%- do lakehouse_patterns.require(
        days is integer and days >= 0, "days must be a whole number, 0 or more, got '" ~ days ~ "'"
    ) -%}
{% endmacro %}
