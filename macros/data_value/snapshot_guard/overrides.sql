{#- Guarded snapshots: dbt's statements on the table. Other snapshots get those of the adapter that runs. -#}

{% macro _is_guarded_snapshot() %}
    {#- For dbt's macros that get no strategy. -#}
    {{ return((config.get('strategy') or '').startswith('lakehouse_patterns.')) }}
{% endmacro %}


{% macro spark__build_snapshot_table(strategy, sql) %}
    {#- The first run. Rows are distributed by what checks them: no check fails in the task that writes, under a trace. -#}
    {%- set rows = lakehouse_patterns.adapter_macro('build_snapshot_table')(strategy, sql) -%}
    {%- if not strategy.get('lakehouse_patterns_updated_at') -%}
        {{ return(rows) }}
    {%- endif -%}
    {{ return(
        'select * from (' ~ rows ~ ')\ndistribute by '
        ~ lakehouse_patterns.quoted_name(lakehouse_patterns._snapshot_columns().dbt_scd_id)
    ) }}
{% endmacro %}


{% macro spark__create_columns(relation, columns) %}
    {#- dbt gives the types of new columns as `describe` cuts them. -#}
    {%- if not lakehouse_patterns._is_guarded_snapshot() -%}
        {{ return(lakehouse_patterns.adapter_macro('create_columns')(relation, columns)) }}
    {%- endif -%}
    {%- set stored = lakehouse_patterns.column_types(relation) -%}
    {%- set given = lakehouse_patterns.query_types(model.compiled_code) -%}
    {%- do lakehouse_patterns.add_columns(
        relation, stored, lakehouse_patterns.schema_differences(stored, given).added
    ) -%}
{% endmacro %}


{% macro spark__snapshot_merge_sql(target, source, insert_cols) %}
    {#- dbt-spark's `insert *` needs every column of the table. One that the query lost is the table's to fill. -#}
    {%- set merge = lakehouse_patterns.adapter_macro('snapshot_merge_sql')(target, source, insert_cols) -%}
    {%- if not lakehouse_patterns._is_guarded_snapshot() -%}
        {{ return(merge) }}
    {%- endif -%}
    {{ return(merge | replace(
        'insert *',
        'insert (' ~ (insert_cols | join(', ')) ~ ') values (DBT_INTERNAL_SOURCE.'
        ~ (insert_cols | join(', DBT_INTERNAL_SOURCE.')) ~ ')'
    )) }}
{% endmacro %}


{% macro spark__snapshot_staging_table(strategy, source_sql, target_relation) %}
    {#- The rows that dbt merges into the table, without any helper column: dbt-spark would add it to the table. -#}
    {%- if not strategy.get('lakehouse_patterns_updated_at') -%}
        {{ return(lakehouse_patterns.adapter_macro('snapshot_staging_table')(
            strategy, source_sql, target_relation
        )) }}
    {%- endif -%}
    {%- set helpers = ['lakehouse_patterns_begins_at'] + lakehouse_patterns._snapshot_key_columns(strategy.unique_key) -%}
    select * except ({{ helpers | join(', ') }})
    from (
        {{ dbt.default__snapshot_staging_table(
            strategy, lakehouse_patterns._snapshot_source(strategy, source_sql, target_relation), target_relation
        ) }}
    )
    {%- if lakehouse_patterns.is_empty_run() %}
    where false
    {%- endif %}
{% endmacro %}


{% macro _snapshot_source(strategy, source_sql, target_relation) %}
    {#- The extract, with the beginning of the version that a row opens if it opens one. -#}
    {%- set columns, helpers, matches = lakehouse_patterns._snapshot_columns(), ['lakehouse_patterns_changed_at'], [] -%}
    {%- set key = lakehouse_patterns.as_list(strategy.unique_key) -%}
    {%- for name in key -%}
        {%- do helpers.append('lakehouse_patterns_key_' ~ loop.index) -%}
        {%- do matches.append('extract.' ~ helpers[-1] ~ ' = stored.' ~ helpers[-1]) -%}
    {%- endfor -%}
    {%- set is_open = columns.dbt_valid_to ~ ' is null' -%}
    {%- if config.get('dbt_valid_to_current') -%}
        {%- set is_open = '(' ~ is_open ~ ' or ' ~ columns.dbt_valid_to ~ ' = ' ~ config.get('dbt_valid_to_current') ~ ')' -%}
    {%- endif -%}
    select
        extract.* except ({{ helpers | join(', ') }}),
        case
            when extract.lakehouse_patterns_changed_at <= stored.last_time then {{ snapshot_get_time() }}
            else extract.lakehouse_patterns_changed_at
        end as lakehouse_patterns_begins_at
    from (
        select
            *,
            {{ strategy.lakehouse_patterns_updated_at }} as lakehouse_patterns_changed_at
            {%- for name in key %},
            {{ name }} as lakehouse_patterns_key_{{ loop.index }}
            {%- endfor %}
        from ({{ source_sql }})
    ) as extract
    left join (
        select
            {%- for name in key %}
            {{ name }} as lakehouse_patterns_key_{{ loop.index }},
            {%- endfor %}
            max(case when {{ is_open }} then {{ columns.dbt_valid_from }} else {{ columns.dbt_valid_to }} end) as last_time
        from {{ target_relation }}
        group by {{ key | join(', ') }}
    ) as stored on {{ matches | join(' and ') }}
{%- endmacro %}
