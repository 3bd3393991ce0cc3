{#-
    Texts as times. Spark completes a text that names no date with today's, one that names no time with midnight, and
    one without an offset with the session's zone: none of that is in the text.
-#}

{% macro _is_full_timestamp(text) %}
    {{ return('(' ~ text ~ " rlike '^[+-]?[0-9]{4,6}-[0-9]{1,2}-[0-9]{1,2}[T ][0-9]{1,2}:[0-9]{1,2}')") }}
{% endmacro %}


{% macro _full_timestamp(text) %}
    {#- The timestamp that a text names with date and time, in UTC unless it names an offset; NULL for any other. -#}
    {%- set has_offset = text ~ " rlike '([Zz]|[+-][0-9]{1,2}(:?[0-9]{2})?|[A-Za-z]{3,}(/[A-Za-z_]+)*)$'" -%}
    {{ return(
        'case when ' ~ lakehouse_patterns._is_full_timestamp(text)
        ~ ' then try_to_timestamp(case when ' ~ has_offset ~ ' then ' ~ text ~ ' else concat(' ~ text ~ ", 'Z') end) end"
    ) }}
{% endmacro %}
