{#- A column's value in Debezium's notation, as SQL. -#}

{% macro _cdc_text_fields(names) %}
    {#- Every value is read as text first, because from_json silently drops a number that doesn't fit its type. -#}
    {%- set fields = [] -%}
    {%- for name in names | unique -%}
        {%- do fields.append(lakehouse_patterns.quoted_name(name) ~ ': string') -%}
    {%- endfor -%}
    {{ return(fields | join(', ')) }}
{% endmacro %}

{% macro _cdc_is_left_out(text) %}
    {#-
        Debezium's placeholder for a value that PostgreSQL didn't send: plain, within an array, in base64 or hex
        (`bytea`), as the bytes of its text (arrays of numbers and dates) or as the UUID of their hash (arrays of uuid).
        Arrays of other types come as NULL, which nobody can tell from NULL.
    -#}
    {%- set placeholder = '__debezium_unavailable_value' -%}
    {%- set bytes = '[95,95,100,101,98,101,122,105,117,109,95,117,110,97,118,97,105,108,97,98,108,101,95,'
        ~ '118,97,108,117,101]' -%}
    {{ return("(contains(" ~ text ~ ", '" ~ placeholder ~ "') or " ~ text
        ~ " = 'X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=='"
        ~ " or contains(" ~ text ~ ", '5f5f646562657a69756d5f756e617661696c61626c655f76616c7565')"
        ~ " or contains(" ~ text ~ ", 'b68a35a7-17ad-35b3-af2a-ae46edb4545a')"
        ~ " or startswith(" ~ text ~ ", '[95') and regexp_replace(" ~ text ~ ", ' ', '') = '" ~ bytes ~ "')") }}
{% endmacro %}

{% macro _cdc_typed(text, type, unit) %}
    {#- Debezium's notation (time.precision.mode adaptive) as a value of the type, a tree; NULL for what is none. -#}
    {%- if type.kind == 'string' -%}
        {{ return(text) }}
    {%- elif type.kind in ('char', 'varchar') -%}
        {{ return(lakehouse_patterns._cdc_short_text(text, type.type)) }}
    {%- elif type.kind in ('timestamp', 'timestamp_ntz') -%}
        {{ return(lakehouse_patterns._cdc_time(text, type.type, unit)) }}
    {%- elif type.kind == 'date' -%}
        {{ return(lakehouse_patterns._cdc_date(text)) }}
    {%- elif type.kind == 'binary' -%}
        {{ return("try_to_binary(" ~ text ~ ", 'base64')") }}
    {%- elif type.kind == 'array' -%}
        {{ return(lakehouse_patterns._cdc_array(text, type.item, unit)) }}
    {%- elif type.kind == 'map' -%}
        {{ return(lakehouse_patterns._cdc_map(text, type.value, unit)) }}
    {%- elif type.kind == 'struct' -%}
        {{ return(lakehouse_patterns._cdc_struct(text, type.fields, unit)) }}
    {%- elif type.kind in ('decimal', 'dec', 'numeric', 'float', 'real', 'double') -%}
        {{ return(lakehouse_patterns._exact_number(text, type.type)) }}
    {%- else -%}
        {{ return('try_cast(' ~ text ~ ' as ' ~ type.type ~ ')') }}
    {%- endif -%}
{% endmacro %}

{% macro _cdc_short_text(text, type) %}
    {%- set length = modules.re.search('\\d+', type).group() -%}
    {{ return('case when char_length(' ~ text ~ ') <= ' ~ length ~ ' then ' ~ text ~ ' end') }}
{% endmacro %}

{% macro _cdc_time(text, type, unit) %}
    {#- A number counts from 1970; a text must hold date and time. -#}
    {%- set number = 'try_cast(' ~ text ~ ' as bigint)' -%}
    {%- set micros = 'try_multiply(' ~ number ~ ', 1000L)' if unit == 'milliseconds' else number -%}
    {%- set counted = 'timestamp_micros(' ~ micros ~ ')' -%}
    {%- if type == 'timestamp' -%}
        {{ return(
            'coalesce(' ~ lakehouse_patterns._cdc_moment(counted) ~ ', ' ~ lakehouse_patterns._full_timestamp(text) ~ ')'
        ) }}
    {%- endif -%}
    {#- The number counts in no zone: through the session's zone and back. -#}
    {{ return(
        "coalesce(convert_timezone('UTC', try_cast(" ~ lakehouse_patterns._cdc_moment(counted) ~ ' as timestamp_ntz)), '
        ~ 'case when ' ~ lakehouse_patterns._is_timestamp(text, 'Z?') ~ ' then try_cast(' ~ text ~ ' as timestamp_ntz) end)'
    ) }}
{% endmacro %}

{% macro _cdc_moment(timestamp) %}
    {#- The timestamp itself; NULL out of the years 1 to 9999, as which Debezium sends PostgreSQL's infinity. -#}
    {{ return(
        'get(filter(array(' ~ timestamp
        ~ '), moment -> ' ~ lakehouse_patterns._is_in_years('moment') ~ '), 0)'
    ) }}
{% endmacro %}

{% macro _cdc_date(text) %}
    {#- Days since 1970, or the date's text; NULL out of the years 1 to 9999. -#}
    {{ return(
        'coalesce(date_from_unix_date(get(filter(array(try_cast(' ~ text
        ~ ' as int)), days -> days between -719162 and 2932896), 0)), case when ' ~ text
        ~ " rlike '^(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}\\\\z' then try_cast(" ~ text ~ ' as date) end)'
    ) }}
{% endmacro %}

{#-
    The elements of a list, a map or a struct are read one by one, because each may have Debezium's notation. One element
    that is no value makes the whole value none. A list of one element stands for a variable: Spark would parse the text again for each use.
-#}

{% macro _cdc_array(text, item_type, unit) %}
    {%- set texts = 'transform(' ~ lakehouse_patterns._json_value(text, 'array<string>', 'marked') ~ ', item -> '
        ~ lakehouse_patterns._as_written('item') ~ ')' -%}
    {%- set items = 'transform(' ~ texts ~ ', item -> ' ~ lakehouse_patterns._cdc_part('item', item_type, unit) ~ ')' -%}
    {{ return(
        'get(transform(array(' ~ items ~ '), items -> case when forall(items, item -> '
        ~ lakehouse_patterns._cdc_is_value('item') ~ ') then transform(items, item -> item.value) end), 0)'
    ) }}
{% endmacro %}

{% macro _cdc_map(text, value_type, unit) %}
    {%- set texts = 'transform_values(' ~ lakehouse_patterns._json_value(text, 'map<string,string>', 'marked')
        ~ ', (name, item) -> ' ~ lakehouse_patterns._as_written('item') ~ ')' -%}
    {%- set items = 'transform_values(' ~ texts ~ ', (name, item) -> '
        ~ lakehouse_patterns._cdc_part('item', value_type, unit) ~ ')' -%}
    {{ return(
        'get(transform(array(' ~ items ~ '), items -> case when forall(map_values(items), item -> '
        ~ lakehouse_patterns._cdc_is_value('item')
        ~ ') then transform_values(items, (name, item) -> item.value) end), 0)'
    ) }}
{% endmacro %}

{% macro _cdc_struct(text, fields, unit) %}
    {%- set written, parts, are_values, typed = [], [], [], [] -%}
    {%- for field in fields -%}
        {%- set name = lakehouse_patterns.text_literal(field.name) ~ ', ' -%}
        {%- set part = 'item.' ~ lakehouse_patterns.quoted_name(field.name) -%}
        {%- do written.append(name ~ lakehouse_patterns._as_written(part)) -%}
        {%- do parts.append(name ~ lakehouse_patterns._cdc_part(part, field.type, unit)) -%}
        {%- do are_values.append(lakehouse_patterns._cdc_is_value(part)) -%}
        {%- do typed.append(name ~ part ~ '.value') -%}
    {%- endfor -%}
    {%- set texts = 'struct<' ~ lakehouse_patterns._cdc_text_fields(fields | map(attribute='name')) ~ '>' -%}
    {{ return(
        'get(transform(transform(transform(filter(array(' ~ lakehouse_patterns._json_value(text, texts, 'marked')
        ~ '), item -> item is not null), item -> named_struct(' ~ written | join(', ')
        ~ ')), item -> named_struct(' ~ parts | join(', ')
        ~ ')), item -> case when ' ~ are_values | join(' and ')
        ~ ' then named_struct(' ~ typed | join(', ') ~ ') end), 0)'
    ) }}
{% endmacro %}

{% macro _cdc_part(text, type, unit) %}
    {{ return(
        "named_struct('is_null', " ~ text ~ " is null, 'value', " ~ lakehouse_patterns._cdc_typed(text, type, unit) ~ ')'
    ) }}
{% endmacro %}

{% macro _cdc_is_value(part) %}
    {{ return('(' ~ part ~ '.is_null or ' ~ part ~ '.value is not null)') }}
{% endmacro %}
