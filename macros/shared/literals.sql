{#-
    Values and names as SQL. Every macro that pastes a text or a name into SQL takes it from here, so that an apostrophe,
    a backslash, a space, a reserved word or a backtick is never read as SQL.
-#}

{% macro text_literal(value) %}
    {{ return("'" ~ (value | string | replace('\\', '\\\\') | replace("'", "\\'")) ~ "'") }}
{% endmacro %}


{% macro text_literals(values) %}
    {%- set literals = [] -%}
    {%- for value in values -%}
        {%- do literals.append(lakehouse_patterns.text_literal(value)) -%}
    {%- endfor -%}
    {{ return(literals | join(', ')) }}
{% endmacro %}


{% macro typed_literal(value, type) %}
    {{ return('cast(' ~ lakehouse_patterns.text_literal(value) ~ ' as ' ~ type ~ ')') }}
{% endmacro %}


{% macro timestamp_literal(moment) %}
    {#- A datetime without a zone is in UTC. -#}
    {%- set utc = moment.astimezone(modules.pytz.utc).replace(tzinfo=none) if moment.tzinfo else moment -%}
    {{ return("timestamp '" ~ utc.isoformat(sep=' ') ~ "+00:00'") }}
{% endmacro %}


{% macro json_text(struct) %}
    {#- The text of a struct, the same in every session: Spark's own formats would drop microseconds, NULLs and UTC. -#}
    {%- set options = {
        'ignoreNullFields': 'false',
        'timeZone': 'UTC',
        'timestampFormat': 'yyyy-MM-dd HH:mm:ss.SSSSSSXXX',
        'timestampNTZFormat': 'yyyy-MM-dd HH:mm:ss.SSSSSS'
    } -%}
    {%- set pairs = [] -%}
    {%- for name, value in options.items() -%}
        {%- do pairs.append("'" ~ name ~ "', '" ~ value ~ "'") -%}
    {%- endfor -%}
    {{ return('to_json(' ~ struct ~ ', map(' ~ (pairs | join(', ')) ~ '))') }}
{% endmacro %}


{% macro exact_text(fields) %}
    {#-
        The text of a struct, given as pairs of a name and a SQL expression, that no other struct has: to_json replaces
        each byte that isn't UTF-8 by one character, so the bytes of such a text follow behind the object. Bytes of a
        binary column are base64 in JSON. Of a list or a struct with such a text nobody knows the bytes: it is refused.
    -#}
    {%- set parts, broken = [], [] -%}
    {%- for name, expression in fields -%}
        {%- do parts.append(lakehouse_patterns.text_literal(name) ~ ', ' ~ expression) -%}
        {%- set text = 'cast(' ~ expression ~ ' as string)' -%}
        {%- do broken.append(
            'case when not typeof(' ~ expression ~ ") rlike '(^|[:<])string' or is_valid_utf8(" ~ text ~ ") then null "
            ~ 'when typeof(' ~ expression ~ ") like 'string%' then concat("
            ~ lakehouse_patterns.text_literal(name ~ ' ') ~ ', hex(' ~ text ~ ')) '
            ~ "when contains(" ~ lakehouse_patterns.json_text('struct(' ~ expression ~ ')') ~ ", '\\ufffd') then "
            ~ "raise_error('lakehouse_patterns: a key takes no list or struct with a text that is not UTF-8') end"
        ) -%}
    {%- endfor -%}
    {{ return(
        "concat_ws(' ', " ~ lakehouse_patterns.json_text('named_struct(' ~ (parts | join(', ')) ~ ')') ~ ', '
        ~ (broken | join(', ')) ~ ')'
    ) }}
{% endmacro %}


{% macro literal_path(path, backslashes=1) %}
    {#- A path in which Hadoop takes no character as a pattern; inside of braces it needs three backslashes. -#}
    {{ return(modules.re.sub('([\\\\{}\\[\\]*?,])', '\\\\' * backslashes ~ '\\1', path | string)) }}
{% endmacro %}


{% macro quoted_name(name, alias=none) %}
    {{ return((alias ~ '.' if alias else '') ~ '`' ~ (name | string | replace('`', '``')) ~ '`') }}
{% endmacro %}


{% macro quoted_names(names, alias=none) %}
    {%- set quoted = [] -%}
    {%- for name in names -%}
        {%- do quoted.append(lakehouse_patterns.quoted_name(name, alias)) -%}
    {%- endfor -%}
    {{ return(quoted) }}
{% endmacro %}
