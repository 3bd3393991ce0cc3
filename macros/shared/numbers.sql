{#-
    Numbers that are none: every comparison with NaN is false in Jinja and in Python, and in Spark's SQL NaN is above
    every number and equal to itself. What judges a bound or takes the newest number asks here first.
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
