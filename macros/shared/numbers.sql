{#-
    Numbers that are none: every comparison with NaN is false in Jinja and in Python, and in Spark's SQL NaN is above
    every number and equal to itself. A macro that compares a bound or takes the newest number asks here first.
-#}

{% macro _is_finite(value) %}
    {#- Whether a value of Jinja is a number other than NaN and infinity; YAML writes them .nan and .inf. -#}
    {{ return(value is number and value is not boolean and value - value == 0) }}
{% endmacro %}


{% macro _is_finite_sql(expression) %}
    {#- Whether a value of SQL is a number other than NaN and infinity; never NULL. -#}
    {{ return(
        'coalesce(abs(try_cast(' ~ expression ~ " as double)) < try_cast('Infinity' as double), false)"
    ) }}
{% endmacro %}


{% macro _finite_or_null_sql(expression) %}
    {#- The value itself, whatever its type; NULL in place of a float's or a double's NaN and infinity. -#}
    {{ return(
        'if(typeof(' ~ expression ~ ") in ('float', 'double') and try_cast(" ~ expression
        ~ " as string) in ('NaN', 'Infinity', '-Infinity'), null, " ~ expression ~ ')'
    ) }}
{% endmacro %}


{% macro _exact_number(text, type) %}
    {#-
        The decimal, float or double that a text writes; NULL if the type has other digits. Spark's cast rounds: `1.239`
        becomes `1.24` in a decimal(5,2), `16777217` becomes `16777216` and `1e39` infinite in a float. A rounded number
        never has the digits of the text, wherever its point is. `python_jobs/shared/records/values.py` has the same rule.
    -#}
    {%- set value = 'try_cast(' ~ text ~ ' as ' ~ type ~ ')' -%}
    {%- set digits = lakehouse_patterns._number_digits(text) -%}
    {%- set exact = digits ~ ' = ' ~ lakehouse_patterns._number_digits('cast(' ~ value ~ ' as string)') -%}
    {%- set written = text ~ " rlike '^[+-]?(?:[0-9]++(?:[.][0-9]*+)?|[.][0-9]++)(?:[eE][+-]?[0-9]++)?\\\\z'" -%}
    {%- if type not in ('float', 'real', 'double') -%}
        {{ return('case when ' ~ written ~ ' and ' ~ exact ~ ' then ' ~ value ~ ' end') }}
    {%- endif -%}
    {#- So few digits are always held, and Java 17 prints some of these numbers with more. -#}
    {%- set few = ' <= 15 and abs(' ~ value ~ ') between 1e-307 and 1e308' if type == 'double'
        else ' <= 6 and abs(' ~ value ~ ') between 1e-37 and 1e38' -%}
    {{ return(
        'case when ' ~ written ~ ' and (' ~ exact ~ ' or length(' ~ digits ~ ')' ~ few ~ ') or ' ~ text
        ~ " in ('NaN', 'Infinity', '-Infinity') then " ~ value ~ ' end'
    ) }}
{% endmacro %}


{% macro _number_digits(number) %}
    {#- The digits of a number's text, without zeros at either end. -#}
    {{ return('trim(both \'0\' from regexp_replace(' ~ number ~ ", '[eE].*$|[-+.]', ''))") }}
{% endmacro %}
