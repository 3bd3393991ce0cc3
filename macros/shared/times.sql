{#-
    Texts as times. Spark completes a text that names no date with today's, one that names no time with midnight, and
    one without an offset with the session's zone: none of that is in the text. Nor does the day of an instant depend on
    the session's zone: it is that of UTC.
-#}

{% macro _is_timestamp(text, offset) %}
    {#-
        Whether a text says date, hour and minute at least, with no more than microseconds, in a year from 1 to 9999.
        `offset` is a pattern of what follows. `python_jobs/shared/records/values.py` has the same rule.
    -#}
    {{ return('(' ~ text ~ " rlike '^(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}"
        ~ "(?::[0-9]{2}(?:[.][0-9]{1,6}0*)?)?" ~ offset ~ "\\\\z')") }}
{% endmacro %}


{% macro _full_timestamp(text) %}
    {#- The timestamp that a text names with date and time, in UTC unless it names an offset; NULL for any other text,
        and for a time outside of the years 1 to 9999 in UTC. -#}
    {%- set in_a_zone = 'case when ' ~ lakehouse_patterns._is_timestamp(text, '')
        ~ ' then concat(' ~ text ~ ", 'Z') else " ~ text ~ ' end' -%}
    {#- Spark's cast takes an offset only behind seconds. -#}
    {%- set value = 'try_to_timestamp(regexp_replace(' ~ in_a_zone ~ ", '^(.{16})( ?[Z+-].*)$', '$1:00$2'))" -%}
    {#- Only on these days an offset can lead out of the years. -#}
    {%- set is_inside = '(left(' ~ text ~ ", 10) not in ('0001-01-01', '9999-12-31') or "
        ~ lakehouse_patterns._is_in_years(value) ~ ')' -%}
    {{ return(
        'case when ' ~ lakehouse_patterns._is_timestamp(text, '(?: ?(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?))?')
        ~ ' and ' ~ is_inside ~ ' then ' ~ value ~ ' end'
    ) }}
{% endmacro %}

{% macro _instant(time, name) %}
    {#-
        A time of any type as an instant, whatever the session's zone: a date begins in UTC, and a time without zone and
        a text without offset are times of UTC. A text that is no full timestamp is NULL, another type is refused. Spark
        knows the type before it reads a row, so a timestamp costs nothing; a text is read once (the lambda's variable).
    -#}
    {%- set type = 'typeof(' ~ time ~ ')' -%}
    {%- set text = 'concat(trim(cast(' ~ time ~ ' as string)), case ' ~ type ~ " when 'date' then ' 00:00' else '' end)" -%}
    {{ return(
        'case when ' ~ type ~ " = 'timestamp' then try_cast(" ~ time ~ ' as timestamp) when ' ~ type
        ~ " in ('date', 'timestamp_ntz', 'string', 'void') then get(transform(array(" ~ text ~ '), moment -> '
        ~ lakehouse_patterns._full_timestamp('moment') ~ '), 0) else raise_error(concat('
        ~ lakehouse_patterns.text_literal(
            'lakehouse_patterns: ' ~ name ~ ' must be a timestamp, a date or a text, got '
        ) ~ ', ' ~ type ~ ')) end'
    ) }}
{% endmacro %}


{% macro _is_in_years(timestamp) %}
    {#-
        Whether a timestamp is in the years 1 to 9999 in UTC. No `between`: Spark computes its operand in every row, even
        behind a condition that excludes the row.
    -#}
    {{ return(
        '(unix_micros(' ~ timestamp ~ ') >= -62135596800000000 and unix_micros(' ~ timestamp
        ~ ') <= 253402300799999999)'
    ) }}
{% endmacro %}


{% macro _moment(name, text) %}
    {#- A time as a naive datetime in UTC. -#}
    {%- do lakehouse_patterns.require(
        modules.re.fullmatch(
            '\\d{4}-\\d{2}-\\d{2}([T ]\\d{2}(:\\d{2}(:\\d{2}([.]\\d{1,6})?)?)?(Z|[+-]\\d{2}:\\d{2})?)?', text | string
        ),
        name ~ " must be a time such as 2024-03-01, 2024-03-01T10 or 2024-03-01T10:30:00+01:00, got '" ~ text ~ "'"
    ) -%}
    {%- set moment = modules.datetime.datetime.fromisoformat(text | string) -%}
    {%- if moment.tzinfo -%}
        {%- set moment = moment.astimezone(modules.pytz.utc).replace(tzinfo=none) -%}
    {%- endif -%}
    {{ return(moment) }}
{% endmacro %}


{% macro _given_or_run_start(name, text) %}
    {#- A time that an argument may give, as a literal; by default the start of the dbt run. -#}
    {%- set moment = lakehouse_patterns._moment(name, text) if text else run_started_at -%}
    {{ return(lakehouse_patterns.timestamp_literal(moment)) }}
{% endmacro %}


{% macro _utc_date(timestamp) %}
    {#- The day in UTC, where a cast would give that of the session's zone. -#}
    {%- set micros = 'unix_micros(' ~ timestamp ~ ')' -%}
    {{ return(
        'date_from_unix_date(try_cast((' ~ micros ~ ' - pmod(' ~ micros ~ ', 86400000000)) div 86400000000 as int))'
    ) }}
{% endmacro %}


{% macro _duration(name, text) %}
    {#- A timedelta of minutes, hours or days. -#}
    {%- set parts = modules.re.fullmatch('(\\d+) (minute|hour|day)s?', text | string) -%}
    {%- do lakehouse_patterns.require(
        parts, name ~ " must be a number of minutes, hours or days such as '2 hours', got '" ~ text ~ "'"
    ) -%}
    {{ return(modules.datetime.timedelta(**{parts[2] ~ 's': parts[1] | int})) }}
{% endmacro %}
