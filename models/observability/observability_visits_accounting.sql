{{ config(
    materialized='incremental',
    incremental_strategy='merge',
    unique_key=['accounted_date', 'status', 'reason'],
    partition_by=['accounted_date'],
    meta={'lakehouse_patterns': {'merger': {
        'sequence': ['last_ingested_at'], 'prune_by': ['accounted_date'], 'on_null_key': 'fail'
    }}}
) }}

-- One precedence for every line: unparsable, invalid, filtered, exact duplicate, superseded, kept. A line without an
-- event time is accounted to the date of its landing folder. Every status and reason of a touched date is written,
-- zeros included, so that a count that fell to nothing replaces the old one.
{%- set reasons = ["('unparsable', 'NOT_A_JSON_OBJECT')"] -%}
{%- for condition in var('visit_conditions') -%}
    {%- do reasons.append("('" ~ condition.category ~ "', '" ~ condition.name ~ "')") -%}
{%- endfor -%}
{%- do reasons.extend([
    "('exact_duplicate', 'same_key_same_payload')", "('superseded', 'same_key_lower_version')", "('kept', '')"
]) %}

with dates as (
    select
        coalesce(event_date, landing_date) as accounted_date,
        last_ingested_at
    from {{ ref('silver_visits_touched_hours') }}
    union all
    -- A file of unparsable lines alone touches no hour.
    select
        date as accounted_date,
        ingested_at as last_ingested_at
    from {{ landed('bronze', 'bronze_visits_files') }}
),

touched_dates as (
    {{ lakehouse_patterns.incremental_groups('dates', by='accounted_date', column='last_ingested_at') }}
),

-- Two branches, so that the first reads only the partitions of the touched dates.
flagged as (
    select
        flagged.event_date as accounted_date,
        flagged.*
    from {{ ref('silver_visits_flagged') }} as flagged
    left semi join touched_dates on flagged.event_date = touched_dates.accounted_date
    union all
    select
        flagged.date as accounted_date,
        flagged.*
    from {{ ref('silver_visits_flagged') }} as flagged
    left semi join touched_dates on flagged.date = touched_dates.accounted_date
    where flagged.event_date is null
),

-- Valid lines by key, rejected ones all together: one pass over the lines for both.
grouped as (
    select
        accounted_date,
        rejected_as,
        rejected_by,
        count(*) as line_count,
        count(distinct payload_hash) as version_count
    from flagged
    group by
        accounted_date,
        rejected_as,
        rejected_by,
        case when rejected_by is null then visit_id end,
        case when rejected_by is null then event_time end
),

dead as (
    {{ lakehouse_patterns.current_lines(
        landed('parsed', 'silver_visits_dead_letter'), landed('bronze', 'bronze_visits_files')
    ) }}
),

counts as (
    select
        accounted_date,
        status,
        reason,
        lines
    from grouped
        lateral view stack(
            3,
            coalesce(rejected_as, 'exact_duplicate'), coalesce(rejected_by, 'same_key_same_payload'),
            line_count - if(rejected_by is null, version_count, 0),
            'superseded', 'same_key_lower_version', if(rejected_by is null, version_count - 1, 0),
            'kept', '', if(rejected_by is null, cast(1 as bigint), 0)
        ) counted as status, reason, lines

    union all

    select
        dead.date as accounted_date,
        'unparsable' as status,
        dead.error_class as reason,
        cast(1 as bigint) as lines
    from dead
    left semi join touched_dates on dead.date = touched_dates.accounted_date
),

reasons as (
    select * from values {{ reasons | join(', ') }} as reasons (status, reason)
),

every_reason as (
    select
        touched_dates.accounted_date,
        touched_dates.last_ingested_at,
        reasons.status,
        reasons.reason
    from touched_dates
    cross join reasons
)

select
    every_reason.accounted_date,
    every_reason.status,
    every_reason.reason,
    coalesce(sum(counts.lines), cast(0 as bigint)) as lines,
    every_reason.last_ingested_at
from every_reason
left join counts
    on every_reason.accounted_date = counts.accounted_date
    and every_reason.status = counts.status
    and every_reason.reason = counts.reason
group by every_reason.accounted_date, every_reason.status, every_reason.reason, every_reason.last_ingested_at
