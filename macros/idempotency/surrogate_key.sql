{#-
    Keyed Idempotency in SQL: keys that any number of runs derive alike, from attributes that never change. PySpark
    renders these very macros (python_jobs/shared/delta/keys.py), so that both forms give the same values.

    `md5(concat_ws('|', coalesce(a, ''), …))` gives NULL and the empty text one key, and `a|b` with `c` that of `a` with
    `b|c`. What is hashed here is a JSON object, which no value can imitate: NULL is `null` and the empty text `""`, and
    a separator inside a value is just a character. Texts of values don't depend on the session: times are in UTC to
    the microsecond. An integer has one text whatever its width. Bytes count as they are, also those of a text that
    isn't UTF-8. Types whose texts aren't stable are refused: those of float and double differ between Java versions,
    those of maps by the order of their entries.
-#}

{% macro surrogate_key(columns, nullable=none, on_null_key='fail') %}
    {{ return(adapter.dispatch('surrogate_key', 'lakehouse_patterns')(columns, nullable, on_null_key)) }}
{% endmacro %}

{% macro default__surrogate_key(columns, nullable, on_null_key) %}
    {#- Fields are named by position: `visits.user_id` and `users.id` give the same key. -#}
    {%- set names = lakehouse_patterns._key_columns('surrogate_key', columns) -%}
    {%- set nullable = lakehouse_patterns.as_list(nullable) -%}
    {%- for name in nullable -%}
        {%- do lakehouse_patterns.require(
            name in names, "nullable '" ~ name ~ "' is no part of the key " ~ (names | join(', '))
        ) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require_one_of('on_null_key', on_null_key, ['fail', 'null']) -%}
    {%- set fields, required = [], [] -%}
    {%- for name in names -%}
        {%- if on_null_key == 'fail' and name not in nullable -%}
            {%- do fields.append((loop.index | string, lakehouse_patterns._key_part_or_error(name))) -%}
        {%- else -%}
            {%- do fields.append((loop.index | string, name)) -%}
        {%- endif -%}
        {%- if on_null_key == 'null' and name not in nullable -%}
            {%- do required.append(name ~ ' is not null') -%}
        {%- endif -%}
    {%- endfor -%}
    {%- set hash = lakehouse_patterns._row_hash(fields) -%}
    {{ return('case when ' ~ (required | join(' and ')) ~ ' then ' ~ hash ~ ' end' if required else hash) }}
{% endmacro %}


{% macro content_hash(columns) %}
    {{ return(adapter.dispatch('content_hash', 'lakehouse_patterns')(columns)) }}
{% endmacro %}

{% macro default__content_hash(columns) %}
    {#- Fields in the order of their names: the order in which columns are listed decides nothing. -#}
    {%- set fields = [] -%}
    {%- for name in lakehouse_patterns._key_columns('content_hash', columns) | sort(case_sensitive=true) -%}
        {%- do fields.append((name, lakehouse_patterns.quoted_name(name))) -%}
    {%- endfor -%}
    {{ return(lakehouse_patterns._row_hash(fields)) }}
{% endmacro %}


{% macro first_append_key(group_by, append_time, ties=none) %}
    {{ return(adapter.dispatch('first_append_key', 'lakehouse_patterns')(group_by, append_time, ties)) }}
{% endmacro %}

{% macro default__first_append_key(group_by, append_time, ties) %}
    {#-
        The event time of a group's first row doesn't stay: a late row becomes the new first one, and the group gets
        another key. A late row is appended late, so the first append stays what it was.
    -#}
    {%- set names = lakehouse_patterns._key_columns('first_append_key', group_by) -%}
    {%- do lakehouse_patterns.require(
        append_time, 'first_append_key needs append_time, the column of when the store took the row, got ' ~ append_time
    ) -%}
    {%- set first = 'min(case when ' ~ append_time ~ ' is not null then '
        ~ lakehouse_patterns._append_position(append_time, ties) ~ ' end) over (partition by ' ~ (names | join(', ')) ~ ')' -%}
    {{ return(lakehouse_patterns.surrogate_key(names + [first])) }}
{% endmacro %}


{% macro _append_position(append_time, ties) %}
    {#- When a row was appended, and what tells it from others that were appended at the same moment. -#}
    {%- set fields = [] -%}
    {%- for expression in [append_time] + lakehouse_patterns.as_list(ties) -%}
        {%- do fields.append("'" ~ loop.index ~ "', " ~ expression) -%}
    {%- endfor -%}
    {{ return('named_struct(' ~ (fields | join(', ')) ~ ')') }}
{% endmacro %}


{% macro _key_columns(macro_name, columns) %}
    {%- set names = lakehouse_patterns.as_list(columns) -%}
    {%- do lakehouse_patterns.require(names, macro_name ~ ' needs at least one column, got ' ~ columns) -%}
    {%- do lakehouse_patterns.require(
        names | unique | list | length == names | length,
        macro_name ~ ' takes each column once, got ' ~ (names | join(', '))
    ) -%}
    {{ return(names) }}
{% endmacro %}


{% macro _key_part_or_error(expression) %}
    {#- In the key itself, where no plan can spare the check. -#}
    {%- set sentence = 'lakehouse_patterns: a row has NULL in its key (' ~ expression ~ ')' -%}
    {{ return('coalesce(' ~ expression ~ ', raise_error(' ~ lakehouse_patterns.text_literal(sentence) ~ '))') }}
{% endmacro %}


{% macro _row_hash(fields) %}
    {#- Pairs of a name and a SQL expression to the hexadecimal SHA-256 of the object that they make. -#}
    {%- set parts = [] -%}
    {%- for name, expression in fields -%}
        {%- do parts.append(lakehouse_patterns.text_literal(name) ~ ', ' ~ expression) -%}
    {%- endfor -%}
    {%- set object = 'named_struct(' ~ (parts | join(', ')) ~ ')' -%}
    {{ return(
        "sha2(if(typeof(" ~ object ~ ") rlike '[:<]((float|double)[,>]|map<)', "
        ~ "raise_error('lakehouse_patterns: a key takes no float, double or map: their texts are not stable'), "
        ~ lakehouse_patterns.exact_text(fields) ~ '), 256)'
    ) }}
{% endmacro %}
