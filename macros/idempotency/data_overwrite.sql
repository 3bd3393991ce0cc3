{#-
    Data Overwrite in SQL: each run replaces the rows that a condition matches by the rows of the model, in one commit.

    dbt-spark's own `insert_overwrite` replaces the partitions that the new rows belong to. A day that has no rows any
    more keeps its old ones, and rows of another day overwrite that day. Here the condition says what is replaced:
    no rows clear the slice, and Delta refuses a row outside of it, with the table as it was.

    A whole table needs nothing of ours: on Delta `materialized='table'` replaces it in one commit.
-#}

{% materialization data_overwrite, adapter='spark', supported_languages=['sql'] %}
    {%- set where = lakehouse_patterns.overwritten() -%}
    {%- set existing_relation = load_relation(this) -%}
    {%- do lakehouse_patterns.require(
        config.get('file_format') == 'delta',
        "materialized='data_overwrite' needs file_format='delta', got '" ~ config.get('file_format') ~ "'"
    ) -%}
    {%- do lakehouse_patterns.require(
        existing_relation is none or existing_relation.is_delta,
        this ~ ' is there and no Delta table: rename or drop it'
    ) -%}
    {%- do lakehouse_patterns.refuse_full_refresh('data_overwrite') -%}
    {{ run_hooks(pre_hooks) }}

    {%- set batch = lakehouse_patterns.batch_view(this) -%}
    {%- call statement('create_batch_view') -%}
        {{ create_temporary_view(batch, compiled_code) }}
    {%- endcall -%}
    {%- set columns = adapter.get_columns_in_relation(batch) -%}
    {%- if existing_relation is none -%}
        {#- Only a replacement checks that the rows match. -#}
        {%- call statement('create_table') -%}
            {{ create_table_as(false, this, 'select * from ' ~ batch ~ ' where false') }}
        {%- endcall -%}
    {%- else -%}
        {%- set columns = adapter.get_columns_in_relation(this) -%}
        {%- do lakehouse_patterns.require_same_columns(this, columns, adapter.get_columns_in_relation(batch)) -%}
    {%- endif -%}
    {%- call statement('main') -%}
        {{ lakehouse_patterns._data_overwrite_sql(this, where, columns | map(attribute='name') | list, batch) }}
    {%- endcall -%}

    {%- do apply_grants(this, config.get('grants'), should_revoke(existing_relation, false)) -%}
    {%- do persist_docs(this, model) -%}
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
    {%- do lakehouse_patterns.require_known_keys('data_overwrite', options, ['where']) -%}
    {%- do lakehouse_patterns.require(
        options.where is string and options.where | trim,
        "data_overwrite needs where, such as \"event_date = date'{logical_date}'\", got '" ~ options.where ~ "'"
    ) -%}
    {%- if '{logical_date}' in options.where -%}
        {{ return(options.where | replace('{logical_date}', lakehouse_patterns.logical_date())) }}
    {%- endif -%}
    {{ return(options.where) }}
{% endmacro %}


{% macro _data_overwrite_sql(relation, where, columns, batch) %}
insert into {{ relation }}
replace where {{ where }}
select {{ lakehouse_patterns.quoted_names(columns) | join(', ') }}
from {{ batch }}
{%- endmacro %}
