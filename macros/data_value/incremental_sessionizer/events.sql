{#- Incremental Sessionizer, the events of a run: where they are, and which of them belong to no session. -#}

{% macro rejected_session_events(
    events, owner, event_time, value, partition, first_run, run=none, period='1 hour', ties=none
) %}
    {{ return(adapter.dispatch('rejected_session_events', 'lakehouse_patterns')(
        events, owner, event_time, value, partition, first_run, run, period, ties
    )) }}
{% endmacro %}

{% macro default__rejected_session_events(
    events, owner, event_time, value, partition, first_run, run, period, ties
) %}
    {#- The run's events that incremental_sessions leaves out, with the reason. -#}
    {%- set of_run = lakehouse_patterns._session_run(run, period, first_run) -%}
    {%- set own = ['error_class', 'error_message', 'run_start'] -%}
    {%- do lakehouse_patterns.require_free_names(
        lakehouse_patterns.known_types(events), own, 'rejected_session_events'
    ) -%}
    {%- set rules = lakehouse_patterns._session_rules(owner, event_time, value, partition, ties) -%}
select
    lakehouse_patterns_record.*,
    error_class,
    error_message,
    {{ of_run.id }} as run_start
from (
    {{ lakehouse_patterns._judged_session_events_sql(events, rules, of_run) }}
)
where error_class is not null
{%- endmacro %}


{% macro _session_rules(owner, event_time, value, partition, ties) %}
    {#- What the events' expressions are, checked. -#}
    {%- for name, text in {'event_time': event_time, 'value': value, 'partition': partition}.items() -%}
        {%- do lakehouse_patterns.require(
            text is string and text | trim,
            name ~ " must be a SQL expression over the events, got '" ~ text ~ "'"
        ) -%}
    {%- endfor -%}
    {{ return({
        'owner': lakehouse_patterns._session_owner(owner),
        'event_time': event_time,
        'value': value,
        'partition': partition,
        'ties': lakehouse_patterns.as_list(ties),
    }) }}
{% endmacro %}


{% macro _session_tie(name) %}
    {#- As python_jobs/shared/records/event_times.py: a cast would make one event of those that differ by a text. -#}
    {%- set quoted = lakehouse_patterns.quoted_name(name) -%}
    {{ return(
        'case when typeof(' ~ quoted ~ ") rlike '^(tinyint|smallint|int|bigint|decimal.([0-9]|1[0-8]),0.)$' then try_cast("
        ~ quoted ~ ' as bigint) else raise_error(' ~ lakehouse_patterns.text_literal(
            "lakehouse_patterns: ties must be integer columns, '" ~ name ~ "' is none: give a column with an integer for "
            ~ 'it, such as unix_micros of a time'
        ) ~ ') end'
    ) }}
{% endmacro %}


{% macro _session_owner(owner) %}
    {#- {column: SQL expression}, from a list of columns or one column, too. -#}
    {%- set columns = {} -%}
    {%- if owner is mapping -%}
        {%- do columns.update(owner) -%}
    {%- else -%}
        {%- for name in lakehouse_patterns.as_list(owner) -%}
            {%- do columns.update({name: lakehouse_patterns.quoted_name(name)}) -%}
        {%- endfor -%}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        columns | length > 0, 'owner must name a column or more, each with its expression, got ' ~ owner
    ) -%}
    {%- for name in columns -%}
        {%- do lakehouse_patterns.require(
            name | lower not in [
                'session_id', 'started_at', 'ended_at', 'duration_ms', 'events', 'values', 'started_date', 'status',
                'expiration_run', 'run_start', 'is_completed', 'error_class', 'error_message'
            ],
            "owner can't have the column '" ~ name ~ "', which the sessions have themselves: give it another name"
        ) -%}
    {%- endfor -%}
    {{ return(columns) }}
{% endmacro %}


{% macro _judged_session_events_sql(events, rules, of_run) %}
    {#- Each event of the run's partition with its owner, time, order and value; with an error if it has no session. -#}
    {%- set absent, absent_owner = [], [] -%}
    {%- for name in rules.owner -%}
        {%- do absent_owner.append(lakehouse_patterns.quoted_name(name) ~ ' is null') -%}
        {%- do absent.append(
            'case when ' ~ lakehouse_patterns.quoted_name(name) ~ ' is null then '
            ~ lakehouse_patterns.text_literal(name) ~ ' end'
        ) -%}
    {%- endfor -%}
    {%- do absent.append("case when lakehouse_patterns_at is null then 'event_time' end") -%}
    {%- set has_null = "concat('the record has NULL in ', concat_ws(', ', " ~ (absent | join(', ')) ~ '))' -%}
    {%- set is_outside = 'lakehouse_patterns_at < ' ~ of_run.id ~ ' or lakehouse_patterns_at >= '
        ~ lakehouse_patterns.timestamp_literal(of_run.end) -%}
    select
        *,
        case
            when {{ absent_owner | join(' or ') }} then 'NULL_KEY'
            when lakehouse_patterns_at is null then 'NULL_TIME'
            when {{ is_outside }} then 'OTHER_RUN'
        end as error_class,
        case
            when {{ absent_owner | join(' or ') }} or lakehouse_patterns_at is null then {{ has_null }}
            when {{ is_outside }} then {{ lakehouse_patterns.text_literal(
                'event_time is not in the interval of the run, from ' ~ of_run.text ~ ' to ' ~ of_run.end.isoformat() ~ 'Z'
            ) }}
        end as error_message
    from (
        select
            {%- for name, expression in rules.owner.items() %}
            {{ expression }} as {{ lakehouse_patterns.quoted_name(name) }},
            {%- endfor %}
            {{ lakehouse_patterns._instant('lakehouse_patterns_time', 'event_time of the sessions') }}
                as lakehouse_patterns_at,
            {%- if rules.ties %}
            array({% for tie in rules.ties -%}
                {{ lakehouse_patterns._session_tie(tie) }}{{ ', ' if not loop.last }}
            {%- endfor %})
                as lakehouse_patterns_order,
            {%- else %}
            try_cast(array() as array<bigint>) as lakehouse_patterns_order,
            {%- endif %}
            try_cast({{ rules.value }} as string) as lakehouse_patterns_value,
            lakehouse_patterns_record
        from (
            select
                *,
                struct(*) as lakehouse_patterns_record,
                {{ rules.event_time }} as lakehouse_patterns_time
            from {{ events }}
            where {{ lakehouse_patterns._run_partition(rules.partition, of_run) }}
        )
    )
{%- endmacro %}
