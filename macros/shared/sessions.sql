{#-
    The rule of sessions, in SQL: two events of an owner that follow each other belong to one session if no more than the
    gap lies between them. python_jobs/shared/core/sessions.py has the same rule, and a test holds the two together.
-#}

{% macro _starts_session(time, previous, gap) %}
    {#- Whether an event starts a session; `previous` is the end of the events before, NULL if there is none. -#}
    {{ return(
        'coalesce(unix_micros(' ~ time ~ ') - unix_micros(' ~ previous ~ ') > ' ~ lakehouse_patterns._micros(gap)
        ~ ', true)'
    ) }}
{% endmacro %}


{% macro _micros(duration) %}
    {#- The microseconds of a timedelta, of whole seconds. -#}
    {{ return((duration.days * 86400 + duration.seconds) * 1000000) }}
{% endmacro %}


{% macro _run_partition(partition, of_run) %}
    {#- The condition of the events of a run, or of another interval, with its values for the names in braces. -#}
    {%- set values = {
        '{start}': of_run.id,
        '{end}': lakehouse_patterns.timestamp_literal(of_run.end),
        '{date}': "date'" ~ of_run.start.date().isoformat() ~ "'",
        '{hour}': of_run.start.hour | string,
    } -%}
    {%- set condition = namespace(sql=partition) -%}
    {%- for name, value in values.items() -%}
        {%- set condition.sql = condition.sql | replace(name, value) -%}
    {%- endfor -%}
    {{ return(condition.sql) }}
{% endmacro %}
