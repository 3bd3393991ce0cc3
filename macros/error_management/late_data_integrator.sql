{#-
    Static Late Data Integrator in dbt: `incremental_strategy='microbatch'` with `lookback` replaces the partitions of
    the last days in each run, oldest first. The macros here add two things that dbt doesn't do:

    - dbt overwrites only partitions for which the query returns rows, so a date that lost all its rows keeps the old
      rows. `clear_vanished_dates`, as a post-hook, removes them.
    - dbt ignores `lookback` with `--event-time-start`, so a backfill must name the first date of the lookback:
      `lookback_dates(date, days)[0]`.
-#}

{% macro lookback_dates(date, days) %}
    {{ return(adapter.dispatch('lookback_dates', 'lakehouse_patterns')(date, days)) }}
{% endmacro %}

{% macro default__lookback_dates(date, days) %}
    {#- Return the `days` dates before `date`, in ascending order, as texts. -#}
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
    {#- Return a statement that deletes this model's last dates without rows in `relation`, or '' if there are none. -#}
    {%- if not execute -%}
        {{ return('') }}
    {%- endif -%}
    {%- do lakehouse_patterns._require_days(days) -%}
    {%- set column = lakehouse_patterns.quoted_name(column) -%}
    {#- Call render(): in a microbatch model a relation converted to text has a filter on the batch's rows. -#}
    {%- set relation = relation.render() -%}
    {%- set first = 'date_sub(' ~ lakehouse_patterns._utc_date('current_timestamp()') ~ ', ' ~ days ~ ')' -%}
    {%- set vanished = run_query(
        'select distinct cast(' ~ column ~ ' as string) as vanished from ' ~ this
        ~ ' where ' ~ column ~ ' >= ' ~ first ~ ' and ' ~ column
        ~ ' not in (select ' ~ column ~ ' from ' ~ relation ~ ' where ' ~ column ~ ' >= ' ~ first
        ~ ') order by vanished'
    ).columns[0].values() -%}
    {%- if not vanished -%}
        {{ return('') }}
    {%- endif -%}
    {{ return(
        'delete from ' ~ this ~ ' where ' ~ column ~ ' in (' ~ lakehouse_patterns.text_literals(vanished) ~ ')'
    ) }}
{% endmacro %}

{% macro _require_days(days) %}
    {%- do lakehouse_patterns.require(
        days is integer and days >= 0, "days must be a whole number, 0 or more, got '" ~ days ~ "'"
    ) -%}
{% endmacro %}
