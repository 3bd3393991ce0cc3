{% macro is_incremental() %}
    {#-
        dbt's `is_incremental()` is true for `materialized='incremental'` alone, and a package can't widen it for
        another project's models: they call `lakehouse_patterns.is_incremental()`. Same rule otherwise.
    -#}
    {%- if not execute -%}
        {{ return(false) }}
    {%- endif -%}
    {%- set relation = adapter.get_relation(this.database, this.schema, this.table) -%}
    {{ return(
        relation is not none
        and relation.type == 'table'
        and model.config.materialized in ['incremental', 'scd2', 'awap']
        and not should_full_refresh()
    ) }}
{% endmacro %}
