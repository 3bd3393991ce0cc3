{#-
    Filter Interceptor in SQL. The optimizer merges all filters of a query into one, with one row count. Here each
    condition has a name, and a rejected row has the name of the first condition that it does not meet.

    A condition that evaluates to NULL rejects the row, as in a `where`, so the macros test `is not true`. (`is false`
    would accept the row and not count it.)

    Materialize the flagged relation as a table and build the other models from it: statistics and valid rows then
    come from one evaluation. A view over the flagged table is the cheapest way to keep only the valid rows.
-#}

{% macro filter_interceptor_flags(relation, conditions) %}
    {{ return(adapter.dispatch('filter_interceptor_flags', 'lakehouse_patterns')(relation, conditions)) }}
{% endmacro %}

{% macro default__filter_interceptor_flags(relation, conditions) %}
    {%- set conditions = lakehouse_patterns._named_conditions(conditions) -%}
    {%- do lakehouse_patterns.require_free_names(
        lakehouse_patterns.known_types(relation), ['rejected_by', 'rejected_as'], 'filter_interceptor_flags'
    ) -%}
select
    *,
    case rejected_by
        {%- for c in conditions %}
        when '{{ c.name }}' then '{{ c.category }}'
        {%- endfor %}
    end as rejected_as
from (
    select
        *,
        case
            {%- for c in conditions %}
            when ({{ c.condition }}) is not true then '{{ c.name }}'
            {%- endfor %}
        end as rejected_by
    from {{ relation }}
)
{%- endmacro %}

{% macro _named_conditions(conditions) %}
    {#- Validate the conditions and return them with their category filled in. -#}
    {%- do lakehouse_patterns.require(
        conditions is sequence and conditions is not string and conditions | length > 0,
        'conditions must be a list of {name, condition}, got ' ~ conditions
    ) -%}
    {%- set checked = [] -%}
    {%- for c in conditions -%}
        {%- do lakehouse_patterns.require(c is mapping, 'a condition is {name, condition}, got ' ~ c) -%}
        {%- do lakehouse_patterns.require_known_keys('a condition', c, ['name', 'condition', 'category']) -%}
        {%- do lakehouse_patterns.require(
            c.name and c.condition, 'a condition needs a name and a condition, got ' ~ c
        ) -%}
        {%- do lakehouse_patterns.require(
            c.name not in checked | map(attribute='name'), "two conditions have the name '" ~ c.name ~ "'"
        ) -%}
        {%- set category = c.category or 'filtered' -%}
        {%- do lakehouse_patterns.require(
            "'" not in c.name ~ category and '\\' not in c.name ~ category,
            'names and categories of conditions hold no quotes or backslashes, got ' ~ c
        ) -%}
        {%- do checked.append({'name': c.name, 'condition': c.condition, 'category': category}) -%}
    {%- endfor -%}
    {{ return(checked) }}
{% endmacro %}

{% macro filter_interceptor_valid_rows(flagged) %}
    {{ return(adapter.dispatch('filter_interceptor_valid_rows', 'lakehouse_patterns')(flagged)) }}
{% endmacro %}

{% macro default__filter_interceptor_valid_rows(flagged) -%}
select * except (rejected_by, rejected_as)
from {{ flagged }}
where rejected_by is null
{%- endmacro %}

{% macro filter_interceptor_statistics(flagged, conditions, run_id=none, run_at=none) %}
    {{ return(adapter.dispatch('filter_interceptor_statistics', 'lakehouse_patterns')(
        flagged, conditions, run_id, run_at
    )) }}
{% endmacro %}

{% macro default__filter_interceptor_statistics(flagged, conditions, run_id, run_at) %}
    {#- One global aggregate, unpivoted: it reads the relation once, and gives zeros for an empty relation too. -#}
    {%- set conditions = lakehouse_patterns._named_conditions(conditions) -%}
select
    {{ lakehouse_patterns.text_literal(run_id or invocation_id) }} as run_id,
    {{ lakehouse_patterns._given_or_run_start('run_at', run_at) }} as run_at,
    stack(
        {{ conditions | length }},
        {%- for c in conditions %}
        {{ loop.index }}, '{{ c.name }}', '{{ c.category }}', rejected_{{ loop.index }}{{ ',' if not loop.last }}
        {%- endfor %}
    ) as (position, condition_name, category, rejected_rows),
    input_rows,
    valid_rows
from (
    select
        count(*) as input_rows,
        count_if(rejected_by is null) as valid_rows,
        {%- for c in conditions %}
        count_if(rejected_by = '{{ c.name }}') as rejected_{{ loop.index }}{{ ',' if not loop.last }}
        {%- endfor %}
    from {{ flagged }}
)
{%- endmacro %}

{% macro filter_interceptor_all_failures(relation, conditions) %}
    {{ return(adapter.dispatch('filter_interceptor_all_failures', 'lakehouse_patterns')(relation, conditions)) }}
{% endmacro %}

{% macro default__filter_interceptor_all_failures(relation, conditions) %}
    {%- set conditions = lakehouse_patterns._named_conditions(conditions) -%}
select
    stack(
        {{ conditions | length }},
        {%- for c in conditions %}
        {{ loop.index }}, '{{ c.name }}', '{{ c.category }}', failed_{{ loop.index }}{{ ',' if not loop.last }}
        {%- endfor %}
    ) as (position, condition_name, category, failed_rows),
    input_rows
from (
    select
        count(*) as input_rows,
        {%- for c in conditions %}
        count_if(({{ c.condition }}) is not true) as failed_{{ loop.index }}{{ ',' if not loop.last }}
        {%- endfor %}
    from {{ relation }}
)
{%- endmacro %}

{% test rejected_share_steady(model, max_rise=0.2, baseline_runs=10) %}
    {{ lakehouse_patterns.rejected_share_rises(model, max_rise, baseline_runs) }}
{% endtest %}

{% macro rejected_share_rises(statistics, max_rise, baseline_runs) %}
    {{ return(adapter.dispatch('rejected_share_rises', 'lakehouse_patterns')(
        statistics, max_rise, baseline_runs
    )) }}
{% endmacro %}

{% macro default__rejected_share_rises(statistics, max_rise, baseline_runs) %}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._is_finite(max_rise) and 0 <= max_rise <= 1,
        'max_rise must be a share between 0 and 1, got ' ~ max_rise
    ) -%}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._is_finite(baseline_runs) and baseline_runs >= 1,
        'baseline_runs must be at least 1, got ' ~ baseline_runs
    ) -%}
    {%- set is_counted = '(rejected_rows is null or ' ~ lakehouse_patterns._is_finite_sql('rejected_rows') ~ ') and '
        ~ lakehouse_patterns._is_finite_sql('input_rows') -%}
{#- A count that is NaN or infinite makes the newest run a rise, and an earlier run none of the baseline. -#}
with runs as (
    select
        run_at,
        run_id,
        bool_and({{ is_counted }}) as is_counted
    from {{ statistics }}
    where input_rows > 0
    group by run_at, run_id
),

newest as (
    select max(struct(run_at, run_id)) as run from runs
),

compared_runs as (
    select
        runs.*,
        struct(runs.run_at, runs.run_id) <=> newest.run as is_newest
    from runs
    cross join newest
    where runs.is_counted or struct(runs.run_at, runs.run_id) <=> newest.run
    order by runs.run_at desc, runs.run_id desc
    limit {{ baseline_runs | int + 1 }}
),

shares as (
    select
        counts.condition_name,
        counts.position,
        compared_runs.is_newest,
        case
            when compared_runs.is_counted then coalesce(try_divide(counts.rejected_rows, counts.input_rows), 0)
            else try_cast('NaN' as double)
        end as share
    from {{ statistics }} as counts
    inner join compared_runs
        on counts.run_at <=> compared_runs.run_at
        and counts.run_id <=> compared_runs.run_id
    where counts.input_rows > 0
),

rises as (
    select
        condition_name,
        min(position) as position,
        sum(case when is_newest then share else 0 end) as share,
        coalesce(avg(case when not is_newest then share end), 0) as baseline_share,
        count(case when not is_newest then 1 end) as baseline_runs
    from shares
    group by condition_name
),

{#- An aggregation without groups, because a window without a partition moves all rows to one task and warns of it. -#}
totals as (
    select
        min_by(
            struct(condition_name, share, baseline_share),
            struct(not isnan(share - baseline_share), baseline_share - share, position, condition_name)
        ) as largest,
        sum(share) as rejected_share,
        sum(baseline_share) as baseline_rejected_share,
        max(baseline_runs) as runs
    from rises
)

-- one row that names the condition with the largest rise
select
    largest.condition_name,
    largest.share,
    largest.baseline_share,
    rejected_share,
    baseline_rejected_share
from totals
where isnan(rejected_share) or (runs > 0 and rejected_share - baseline_rejected_share > {{ max_rise }})
{%- endmacro %}
