{#-
    Data Overwrite in SQL: each run replaces the rows that a condition matches by the rows of the model, in one commit.

    dbt-spark's own `insert_overwrite` replaces the partitions that the new rows belong to. A day that has no rows any
    more keeps its old ones, and rows of another day overwrite that day. Here the condition says what is replaced:
    no rows clear the slice, and Delta refuses a row outside of it, with the table as it was.

    A whole table needs nothing of ours: on Delta `materialized='table'` replaces it in one commit.
-#}

{% materialization data_overwrite, adapter='spark', supported_languages=['sql'] %}
    {%- set where = lakehouse_patterns.overwritten() -%}
    {%- set context = lakehouse_patterns.start_materialization('data_overwrite') -%}
    {%- do lakehouse_patterns.refuse_full_refresh('data_overwrite') -%}
    {{ run_hooks(pre_hooks) }}

    {%- do lakehouse_patterns.stage_batch(context, compiled_code) -%}
    {%- if context.existing is none -%}
        {#- Only a replacement checks that the rows match. -#}
        {%- call statement('create_table') -%}
            {{ create_table_as(false, this, 'select * from ' ~ context.batch ~ ' where false') }}
        {%- endcall -%}
    {%- endif -%}
    {%- do lakehouse_patterns.persist_table_constraints(this) -%}
    {%- if context.is_empty -%}
        {%- do lakehouse_patterns.publish_nothing(context) -%}
    {%- else -%}
        {%- set stored = lakehouse_patterns.follow_schema(
            this, lakehouse_patterns.column_types(this), context.types
        ) -%}
        {%- call statement('main') -%}
            {{ lakehouse_patterns._data_overwrite_sql(
                this, where, lakehouse_patterns.selected_by_name(stored, context.types), context.batch
            ) }}
        {%- endcall -%}
    {%- endif -%}

    {%- do lakehouse_patterns.finish_materialization(context) -%}
    {{ run_hooks(post_hooks) }}
    {{ return({'relations': [this]}) }}
{% endmaterialization %}


{% macro overwritten() %}
    {{ return(adapter.dispatch('overwritten', 'lakehouse_patterns')()) }}
{% endmacro %}

{% macro default__overwritten() %}
    {#- The condition of the running model's slice, for its materialization and for its own SQL. -#}
    {%- if not execute -%}
        {{ return('true') }}
    {%- endif -%}
    {{ return(lakehouse_patterns._data_overwrite_where(lakehouse_patterns.options('data_overwrite') or {})) }}
{% endmacro %}


{% macro _data_overwrite_where(options) %}
    {%- do lakehouse_patterns.require_pattern_options('data_overwrite', options) -%}
    {%- do lakehouse_patterns.require(
        options.where is string and options.where | trim,
        "data_overwrite needs where, such as \"event_date = date'{logical_date}'\", got '" ~ options.where ~ "'"
    ) -%}
    {%- set where = options.where -%}
    {%- if '{logical_date}' in where -%}
        {%- set where = where | replace('{logical_date}', lakehouse_patterns.logical_date()) -%}
    {%- endif -%}
    {%- if '{logical_time}' in where -%}
        {%- set where = where | replace('{logical_time}', lakehouse_patterns.logical_time()) -%}
    {%- endif -%}
    {{ return(where) }}
{% endmacro %}


{% macro _data_overwrite_sql(relation, where, selected, batch) %}
insert into {{ relation }} by name
replace where {{ where }}
select {{ selected | join(', ') }}
from {{ batch }}
{%- endmacro %}
