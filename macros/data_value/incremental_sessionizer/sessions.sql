{#-
    Incremental Sessionizer: sessions of events that land in partitions of time, one run for each partition.

    A run reads the events of its interval and the sessions that the run before left open, and writes three kinds of rows
    into the pending table, in one commit: `open` sessions, `completed` ones, and a marker that the run is `computed`.
    The completed sessions then go to a public table, and a second marker says that the run is `published`. A run needs
    the marker of the run before, so that none is left out. Each write replaces the rows of its run and of all later
    ones: after a rerun the markers of the later runs are gone, and these have to run again, too.

    A session is completed when no event of a later run can join it: its last event and the gap lie before the end of the
    run's interval. So the gap is compared in time; counted in runs, a session would join events that are further apart.

    An event that is not of the run's interval would make this wrong, and is rejected like one without owner or time.
-#}

{% macro incremental_sessions(
    events, pending, owner, event_time, value, gap, partition, first_run, run=none, period='1 hour', ties=none
) %}
    {{ return(adapter.dispatch('incremental_sessions', 'lakehouse_patterns')(
        events, pending, owner, event_time, value, gap, partition, first_run, run, period, ties
    )) }}
{% endmacro %}

{% macro default__incremental_sessions(
    events, pending, owner, event_time, value, gap, partition, first_run, run, period, ties
) %}
    {%- set of_run = lakehouse_patterns._session_run(run, period, first_run) -%}
    {%- do lakehouse_patterns._require_pending(pending, of_run) -%}
    {%- set rules = lakehouse_patterns._session_rules(owner, event_time, value, partition, ties) -%}
    {{ return(lakehouse_patterns._session_rows_sql(
        '(' ~ lakehouse_patterns._judged_session_events_sql(events, rules, of_run) ~ ')',
        pending, rules.owner, lakehouse_patterns._session_gap(gap), of_run
    )) }}
{% endmacro %}


{% macro completed_sessions(pending, owner, first_run, run=none, period='1 hour') %}
    {{ return(adapter.dispatch('completed_sessions', 'lakehouse_patterns')(pending, owner, first_run, run, period)) }}
{% endmacro %}

{% macro default__completed_sessions(pending, owner, first_run, run, period) %}
    {#-
        The second part has no row. It ends the query of a run that isn't the newest one, whose write would remove the
        sessions of the later runs.
    -#}
    {%- set of_run = lakehouse_patterns._session_run(run, period, first_run) -%}
    {%- set columns = lakehouse_patterns._session_columns(owner) -%}
select {{ columns | join(', ') }}
from {{ pending }}
where run_start = {{ of_run.id }} and status = 'completed'
union all
select
    {%- for _ in columns %}
    null as lakehouse_patterns_{{ loop.index }}{{ ',' if not loop.last }}
    {%- endfor %}
from (select 1 as one)
where not case
    when (
        select count_if(run_start = {{ of_run.id }} and status = 'computed') > 0 and count_if(run_start > {{ of_run.id }}) = 0
        from {{ pending }}
        where run_start >= {{ of_run.id }}
    ) then true
    else raise_error({{ lakehouse_patterns.text_literal(
        'lakehouse_patterns: the run of ' ~ of_run.text ~ ' is not the newest one in ' ~ pending
        ~ ': compute it again, and then all later runs'
    ) }})
end
{%- endmacro %}


{% macro sessions_with_open(sessions, pending, owner) %}
    {{ return(adapter.dispatch('sessions_with_open', 'lakehouse_patterns')(sessions, pending, owner)) }}
{% endmacro %}

{% macro default__sessions_with_open(sessions, pending, owner) %}
    {#-
        The sessions as of the last run that is published, those still open included. A run that is being written shows
        nothing yet, so that no session is there twice.
    -#}
    {%- set columns = lakehouse_patterns._session_columns(owner, is_stored=true) -%}
    {%- set last_run = '(select max(runs.run_start) from ' ~ pending
        ~ " as runs where runs.status = 'published')" -%}
select {{ columns | join(', ') }}, true as is_completed
from {{ sessions }}
where run_start <= {{ last_run }}
union all
select {{ lakehouse_patterns._session_columns(owner) | join(', ') }}, false as is_completed
from {{ pending }}
where run_start = {{ last_run }} and status = 'open'
{%- endmacro %}


{% macro _session_gap(gap) %}
    {%- set duration = lakehouse_patterns._duration('gap', gap) -%}
    {%- do lakehouse_patterns.require(
        duration.total_seconds() > 0, "gap must be longer than 0, got '" ~ gap ~ "'"
    ) -%}
    {{ return(duration) }}
{% endmacro %}


{% macro _session_columns(owner, is_stored=false) %}
    {#- The columns of the public table in their order; of the pending table's rows unless `is_stored`. -#}
    {%- set duration = 'duration_ms' if is_stored
        else '(unix_micros(ended_at) - unix_micros(started_at)) div 1000 as duration_ms' -%}
    {%- set date = 'started_date' if is_stored else lakehouse_patterns._utc_date('started_at') ~ ' as started_date' -%}
    {{ return(
        ['session_id'] + lakehouse_patterns.quoted_names(lakehouse_patterns._session_owner(owner))
        + ['started_at', 'ended_at', duration, 'events', '`values`', date, 'run_start']
    ) }}
{% endmacro %}


{% macro _session_rows_sql(judged, pending, owner, gap, of_run) %}
    {#- The rows of a run in the pending table. `judged` gives the events as _judged_session_events_sql. -#}
    {%- set names = lakehouse_patterns.quoted_names(owner) -%}
select
    case when expiration_run <= {{ of_run.id }} then 'completed' else 'open' end as status,
    {{ lakehouse_patterns.surrogate_key(names + ['unix_micros(started_at)']) }} as session_id,
    {{ names | join(', ') }},
    started_at,
    ended_at,
    events,
    `values`,
    expiration_run,
    {{ of_run.id }} as run_start
from (
    select
        *,
        {{ lakehouse_patterns._expiration_run('ended_at', gap, of_run.period) }} as expiration_run
    from (
        {{ lakehouse_patterns._sessions_sql(judged, pending, names, gap, of_run) }}
    )
)
union all
select
    'computed' as status,
    null as session_id,
    {%- for name in names %}
    null as {{ name }},
    {%- endfor %}
    null as started_at,
    null as ended_at,
    null as events,
    null as `values`,
    null as expiration_run,
    {{ of_run.id }} as run_start
from (select 1 as one)
{%- if not of_run.is_first %}
where case
    when {{ lakehouse_patterns._is_published(pending, of_run) }} then true
    else raise_error({{ lakehouse_patterns.text_literal(
        'lakehouse_patterns: ' ~ lakehouse_patterns._no_previous_run(pending, of_run)
    ) }})
end
{%- endif %}
{%- endmacro %}


{% macro _expiration_run(ended_at, gap, period) %}
    {#-
        The run that completes the session if no event joins it: whose interval holds the last moment at which one
        could, the last event plus the gap. Of events at 9:01 and 11:30 with a gap of two hours it is the run of 11.
    -#}
    {%- set last = '(unix_micros(' ~ ended_at ~ ') + ' ~ lakehouse_patterns._micros(gap) ~ ')' -%}
    {{ return(
        'timestamp_micros(' ~ last ~ ' - pmod(' ~ last ~ ', ' ~ lakehouse_patterns._micros(period) ~ '))'
    ) }}
{% endmacro %}


{% macro _sessions_sql(judged, pending, names, gap, of_run) %}
    {#-
        The sessions of the run's events and of the run before. A session left open is one more item in the line of its
        owner's events, before all of them, so that nothing is joined: one exchange by owner does both.
    -#}
    {%- set owner = names | join(', ') -%}
    {%- set line = 'partition by ' ~ owner ~ ' order by lakehouse_patterns_start' -%}
    select
        {{ owner }},
        started_at,
        ended_at,
        coalesce(lakehouse_patterns_earlier, 0) + size(lakehouse_patterns_new) as events,
        concat(
            coalesce(lakehouse_patterns_earlier_values, try_cast(array() as array<string>)),
            transform(array_sort(lakehouse_patterns_new), event -> event.value)
        ) as `values`
    from (
        select
            {{ owner }},
            min(lakehouse_patterns_start) as started_at,
            max(lakehouse_patterns_end) as ended_at,
            max(lakehouse_patterns_events) as lakehouse_patterns_earlier,
            max(lakehouse_patterns_values) as lakehouse_patterns_earlier_values,
            {#- A set, because equal events are one event. #}
            collect_set(lakehouse_patterns_event) as lakehouse_patterns_new
        from (
            select
                *,
                {#- Events of one time get one number, whatever their order here. #}
                count_if(lakehouse_patterns_starts) over ({{ line }} range unbounded preceding) as lakehouse_patterns_number
            from (
                select
                    *,
                    {{ lakehouse_patterns._starts_session(
                        'lakehouse_patterns_start', 'lag(lakehouse_patterns_end) over (' ~ line ~ ')', gap
                    ) }} as lakehouse_patterns_starts
                from (
                    select
                        {{ owner }},
                        lakehouse_patterns_at as lakehouse_patterns_start,
                        lakehouse_patterns_at as lakehouse_patterns_end,
                        struct(
                            lakehouse_patterns_at as at,
                            lakehouse_patterns_order as event_order,
                            lakehouse_patterns_value as value
                        ) as lakehouse_patterns_event,
                        cast(null as int) as lakehouse_patterns_events,
                        cast(null as array<string>) as lakehouse_patterns_values
                    from {{ judged }}
                    where error_class is null
                    {%- if not of_run.is_first %}
                    union all
                    select {{ owner }}, started_at, ended_at, null as lakehouse_patterns_event, events, `values`
                    from {{ pending }}
                    where run_start = {{ lakehouse_patterns.timestamp_literal(of_run.previous) }} and status = 'open'
                    {%- endif %}
                )
            )
        )
        group by {{ owner }}, lakehouse_patterns_number
    )
{%- endmacro %}
