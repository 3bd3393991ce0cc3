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
