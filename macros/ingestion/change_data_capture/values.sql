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
        Debezium's placeholder for a value that PostgreSQL didn't send: plain, within an array, in base64, as the bytes of
        its text (arrays of numbers and dates) or as the UUID of their hash (arrays of uuid). Arrays of other types come
        as NULL, which nobody can tell from NULL.
    -#}
    {%- set placeholder = '__debezium_unavailable_value' -%}
    {%- set bytes = '[95,95,100,101,98,101,122,105,117,109,95,117,110,97,118,97,105,108,97,98,108,101,95,'
        ~ '118,97,108,117,101]' -%}
    {{ return("(contains(" ~ text ~ ", '" ~ placeholder ~ "') or " ~ text
        ~ " = 'X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=='"
        ~ " or contains(" ~ text ~ ", 'b68a35a7-17ad-35b3-af2a-ae46edb4545a')"
        ~ " or startswith(" ~ text ~ ", '[95') and regexp_replace(" ~ text ~ ", ' ', '') = '" ~ bytes ~ "')") }}
{% endmacro %}

{% macro _cdc_typed(text, column) %}
    {#- Debezium's notation (time.precision.mode adaptive) as a value of the type; NULL for what is none. -#}
    {%- set type = column.type | lower -%}
    {%- set kind = modules.re.match('\\w+', type).group() -%}
    {%- if kind == 'string' -%}
        {{ return(text) }}
    {%- elif kind in ('char', 'varchar') -%}
        {{ return(lakehouse_patterns._cdc_short_text(text, type)) }}
    {%- elif kind in ('timestamp', 'timestamp_ntz') -%}
        {{ return(lakehouse_patterns._cdc_time(text, type, column.unit)) }}
    {%- elif kind == 'date' -%}
        {{ return(lakehouse_patterns._cdc_date(text)) }}
    {%- elif kind == 'binary' -%}
        {{ return("try_to_binary(" ~ text ~ ", 'base64')") }}
    {%- elif kind == 'array' -%}
        {{ return(lakehouse_patterns._cdc_array(text, column)) }}
    {%- elif kind in ('map', 'struct') -%}
        {{ return(lakehouse_patterns._json_value(text, column.type)) }}
    {%- elif kind in ('decimal', 'dec', 'numeric') -%}
        {{ return(lakehouse_patterns._cdc_decimal(text, type)) }}
    {%- else -%}
        {{ return('try_cast(' ~ text ~ ' as ' ~ type ~ ')') }}
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
    {%- if type == 'timestamp' -%}
        {{ return('coalesce(timestamp_micros(' ~ micros ~ '), ' ~ lakehouse_patterns._full_timestamp(text) ~ ')') }}
    {%- endif -%}
    {#- The number counts in no zone: through the session's zone and back. -#}
    {{ return(
        "coalesce(convert_timezone('UTC', try_cast(timestamp_micros(" ~ micros ~ ') as timestamp_ntz)), '
        ~ 'case when ' ~ lakehouse_patterns._is_timestamp(text, 'Z?') ~ ' then try_cast(' ~ text ~ ' as timestamp_ntz) end)'
    ) }}
{% endmacro %}

{% macro _cdc_date(text) %}
    {#- Days since 1970, or the date's text. -#}
    {{ return(
        'coalesce(date_from_unix_date(try_cast(' ~ text ~ ' as int)), case when ' ~ text
        ~ " rlike '^-?[0-9]{4,}-[0-9]{2}-[0-9]{2}$' then try_cast(" ~ text ~ ' as date) end)'
    ) }}
{% endmacro %}

{% macro _cdc_array(text, column) %}
    {#- Element by element, as each may be in Debezium's notation; one that is no value makes the whole none. -#}
    {%- set item = {'type': column.type[column.type.find('<') + 1:-1] | trim, 'unit': column.unit} -%}
    {%- set typed = lakehouse_patterns._cdc_typed('item', item) -%}
    {%- set items = 'transform(' ~ lakehouse_patterns._json_value(text, 'array<string>', 'marked') ~ ', item -> '
        ~ lakehouse_patterns._as_written('item') ~ ')' -%}
    {{ return(
        'case when forall(' ~ items ~ ', item -> item is null or ' ~ typed ~ ' is not null) '
        ~ 'then transform(' ~ items ~ ', item -> ' ~ typed ~ ') end'
    ) }}
{% endmacro %}

{% macro _cdc_decimal(text, type) %}
    {#- NULL for what a cast would round: the source's column may be wider. -#}
    {%- set digits = modules.re.findall('\\d+', type) | map('int') | list -%}
    {%- set scale = digits[1] if digits | length > 1 else 0 -%}
    {%- set exact = 'decimal(38, ' ~ (38 - digits[0] + scale) ~ ')' -%}
    {{ return(
        'case when try_cast(' ~ text ~ ' as ' ~ type ~ ') = try_cast(' ~ text ~ ' as ' ~ exact
        ~ ') then try_cast(' ~ text ~ ' as ' ~ type ~ ') end'
    ) }}
{% endmacro %}
