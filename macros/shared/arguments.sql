{#-
    What every public macro needs to refuse wrong arguments when it is compiled, in one sentence that says
    what it got and what is allowed.
-#}

{% macro require(condition, message) %}
    {%- if not condition -%}
        {%- do exceptions.raise_compiler_error('lakehouse_patterns: ' ~ message) -%}
    {%- endif -%}
{% endmacro %}

{% macro require_one_of(name, value, allowed) %}
    {%- do lakehouse_patterns.require(
        value in allowed, name ~ " must be one of " ~ (allowed | join(', ')) ~ ", got '" ~ value ~ "'"
    ) -%}
{% endmacro %}

{% macro require_known_keys(name, mapping, allowed) %}
    {%- for key in mapping -%}
        {%- do lakehouse_patterns.require(
            key in allowed, name ~ " has no option '" ~ key ~ "'; allowed: " ~ (allowed | join(', '))
        ) -%}
    {%- endfor -%}
{% endmacro %}

{% macro as_list(value) %}
    {%- if value is none -%}
        {{ return([]) }}
    {%- elif value is string -%}
        {{ return([value]) }}
    {%- else -%}
        {{ return(value | list) }}
    {%- endif -%}
{% endmacro %}
