{#-
    `dbt build --empty` checks the SQL of every model and changes nothing that is published. The package's
    materializations, merges and snapshots follow this rule themselves. dbt's own tables, and its views, which keep the
    empty subqueries for which `ref` stands, would lose their rows: the materializations below replace dbt's.
-#}

{% materialization table, adapter='spark', supported_languages=['sql', 'python'] %}
    {{ return(kept_in_empty_run() or dbt.materialization_table_spark()) }}
{% endmaterialization %}


{% materialization view, adapter='spark' %}
    {{ return(kept_in_empty_run() or dbt.materialization_view_spark()) }}
{% endmaterialization %}


{% macro kept_in_empty_run() %}
    {%- set existing = load_relation(this) -%}
    {%- if existing is none or not lakehouse_patterns.is_empty_run() -%}
        {{ return(none) }}
    {%- endif -%}
    {%- call statement('main') -%}
        {{ create_temporary_view(lakehouse_patterns.batch_view(this), compiled_code) }}
    {%- endcall -%}
    {%- do log('--empty: ' ~ this ~ ' stays as it is', info=true) -%}
    {{ return({'relations': [existing]}) }}
{% endmacro %}


{% macro refuse_emptying() %}
    {#- An on-run-start hook: a full refresh replaces a table to which each run appends. -#}
    {%- do lakehouse_patterns.require(
        not (lakehouse_patterns.is_empty_run() and flags.FULL_REFRESH),
        '--empty with --full-refresh would replace the rows of published tables by none: leave out one of the two'
    ) -%}
{% endmacro %}
