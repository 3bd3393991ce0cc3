{% macro require_environment() %}
    {#- Without the environment dbt would write to an empty path and start Spark without Delta. -#}
    {%- do lakehouse_patterns.require(
        env_var('LAKEHOUSE_ROOT', '') != '',
        'LAKEHOUSE_ROOT is not set: run `source .venv/bin/activate` in the repository first'
    ) -%}
{% endmacro %}
