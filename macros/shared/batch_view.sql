{% macro batch_view(relation) %}
    {#- The temporary view of a model's SQL, named as dbt-spark's incremental materialization names it. -#}
    {{ return(
        relation.incorporate(path={'identifier': relation.identifier ~ '__dbt_tmp'}).include(database=false, schema=false)
    ) }}
{% endmacro %}
