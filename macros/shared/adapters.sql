{#-
    Which adapter runs. dbt searches our package before its own, and in each package it searches the adapter's macros and
    then those of the adapter's parents. On dbt-databricks it therefore finds our `spark__get_merge_sql` before
    `databricks__get_merge_sql`: an override of ours must pass a model without options on to the adapter that runs.
-#}

{% macro proved_adapters() %}
    {#- The adapters that the package's tests run on. -#}
    {{ return(['spark']) }}
{% endmacro %}


{% macro adapter_macro(name) %}
    {#- The macro that dbt calls without this package: the adapter's own, dbt-spark's, or the one for all adapters. -#}
    {%- for prefix in [adapter.type(), 'spark', 'default'] -%}
        {%- set found = dbt.get(prefix ~ '__' ~ name) -%}
        {%- if found is not none -%}
            {{ return(found) }}
        {%- endif -%}
    {%- endfor -%}
{% endmacro %}


{% macro require_proved_adapter(what) %}
    {%- set proved = lakehouse_patterns.proved_adapters() -%}
    {%- do lakehouse_patterns.require(
        adapter.type() in proved,
        what ~ ' needs the adapter ' ~ (proved | join(' or ')) ~ ", got '" ~ adapter.type()
        ~ "', on which the pattern was never tested: remove it, or run the model with dbt-spark"
    ) -%}
{% endmacro %}
