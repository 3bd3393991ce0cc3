{#-
    dbt's own snapshot strategies behind checks: `strategy: lakehouse_patterns.timestamp` (or `.check`).
    What dbt's snapshots do wrong on Spark is refused, or repaired where a right answer is known:

    - A version begins at `updated_at`, or at the run's start when that is not after the beginning or the end of the key's
      last version: a deleted row that returns, and values that changed under an old time. dbt would lose the row, make
      versions overlap, or fail.
    - With a list of keys dbt-spark adds helper columns to the table and fails at the second run.
    - `--empty` reads no row of the source, and dbt would close all versions; `--sample` reads a part, and dbt would close
      the others.
    - A column of the query with a name of dbt's own, or of a type that no later run can compare, is refused by the first
      run. So is a row that a later run refuses.
    - A column that the query no longer has is left to the table, where dbt-spark fails; a new one gets its whole type.

    With `check_cols` the timestamp strategy adds a version only when the time is newer and one of these columns differs.
-#}

{% macro snapshot_timestamp_strategy(node, snapshotted_rel, current_rel, model_config, target_exists) %}
    {{ return(adapter.dispatch('snapshot_timestamp_strategy', 'lakehouse_patterns')(
        node, snapshotted_rel, current_rel, model_config, target_exists
    )) }}
{% endmacro %}

{% macro default__snapshot_timestamp_strategy(node, snapshotted_rel, current_rel, model_config, target_exists) %}
    {%- do lakehouse_patterns._require_safe_snapshot() -%}
    {%- set columns = lakehouse_patterns._snapshot_query_columns(node) -%}
    {%- set current = current_rel ~ '.' ~ lakehouse_patterns._snapshot_quoted(columns, config.get('updated_at')) -%}
    {%- set row_changed = lakehouse_patterns._snapshot_stored_time(snapshotted_rel, target_exists) ~ ' < ' ~ current -%}
    {%- if config.get('check_cols') -%}
        {%- set row_changed = '(' ~ row_changed ~ ' and '
            ~ lakehouse_patterns._snapshot_values_differ(columns, snapshotted_rel, current_rel, target_exists) ~ ')' -%}
    {%- endif -%}
    {#- dbt compares times, so a row whose time is NULL would never be seen again. -#}
    {{ return(lakehouse_patterns._snapshot_strategy(
        columns, '(' ~ current ~ ' is null or ' ~ row_changed ~ ')', target_exists
    )) }}
{% endmacro %}


{% macro snapshot_check_strategy(node, snapshotted_rel, current_rel, model_config, target_exists) %}
    {{ return(adapter.dispatch('snapshot_check_strategy', 'lakehouse_patterns')(
        node, snapshotted_rel, current_rel, model_config, target_exists
    )) }}
{% endmacro %}

{% macro default__snapshot_check_strategy(node, snapshotted_rel, current_rel, model_config, target_exists) %}
    {%- do lakehouse_patterns._require_safe_snapshot() -%}
    {%- do lakehouse_patterns.require(
        config.get('check_cols'), "strategy lakehouse_patterns.check needs check_cols: 'all' or a list of columns"
    ) -%}
    {%- set columns = lakehouse_patterns._snapshot_query_columns(node) -%}
    {{ return(lakehouse_patterns._snapshot_strategy(
        columns,
        lakehouse_patterns._snapshot_values_differ(columns, snapshotted_rel, current_rel, target_exists),
        target_exists
    )) }}
{% endmacro %}


{% macro _require_safe_snapshot() %}
    {%- do lakehouse_patterns.require_proved_adapter("a snapshot's strategy of lakehouse_patterns") -%}
    {%- do lakehouse_patterns.require_no_sample('a snapshot') -%}
    {%- set reasons = {
        'ignore': 'a key that is gone from the extract would stay current for ever',
        'new_record': 'dbt-spark writes its delete records with a NULL key and NULL columns',
    } -%}
    {%- set hard_deletes = adapter.get_hard_deletes_behavior(config) -%}
    {%- do lakehouse_patterns.require(
        hard_deletes == 'invalidate',
        "hard_deletes must be 'invalidate', got '" ~ hard_deletes ~ "': " ~ reasons.get(hard_deletes)
    ) -%}
    {%- do lakehouse_patterns.require(
        config.get('updated_at'),
        "a snapshot needs updated_at, the source's time of the change: without it versions begin when dbt runs"
    ) -%}
    {%- set package = adapter.dispatch('snapshot_staging_table', 'dbt').macro.package_name -%}
    {%- do lakehouse_patterns.require(
        package == 'lakehouse_patterns',
        'the strategies of lakehouse_patterns need its snapshot_staging_table, got that of ' ~ package
        ~ ': dispatch in dbt_project.yml must name lakehouse_patterns before dbt'
    ) -%}
{% endmacro %}


{% macro _snapshot_columns() %}
    {{ return(config.get('snapshot_table_column_names') or dbt.get_snapshot_table_column_names()) }}
{% endmacro %}


{% macro _snapshot_query_columns(node) %}
    {#- The query's columns, checked, as a mapping of names to types. -#}
    {%- set columns = lakehouse_patterns.query_types(node['compiled_code']) -%}
    {%- do lakehouse_patterns._snapshot_require_free_names(columns) -%}
    {%- do lakehouse_patterns._snapshot_require_usable_options(columns) -%}
    {{ return(columns) }}
{% endmacro %}


{% macro _snapshot_require_free_names(columns) %}
    {%- set own = ['dbt_change_type', 'dbt_unique_key'] -%}
    {%- do own.extend(lakehouse_patterns._snapshot_columns().values()) -%}
    {%- do own.extend(lakehouse_patterns._snapshot_key_columns(config.get('unique_key'))) -%}
    {%- for name in columns -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns.column_name(own, name) is none,
            "the snapshot's column '" ~ name ~ "' has a name that dbt gives to a column of its own: rename it in the query"
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro _snapshot_require_usable_options(columns) %}
    {#- What only the second run would compare is refused by the first. -#}
    {%- set key, updated_at = lakehouse_patterns.as_list(config.get('unique_key')), config.get('updated_at') -%}
    {%- for name in key if modules.re.fullmatch('\\w+|`[^`]+`', name) -%}
        {%- do lakehouse_patterns._snapshot_require_column(
            columns, name, 'unique_key of a snapshot must name columns of its query'
        ) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require_sortable(columns, key, 'unique_key') -%}
    {#- dbt compares `source_data.<updated_at>`: no expression. -#}
    {%- do lakehouse_patterns.require_time(
        columns,
        'updated_at of a snapshot',
        lakehouse_patterns._snapshot_require_column(
            columns, updated_at, 'updated_at of a snapshot must be a column that its query selects or computes'
        )
    ) -%}
    {%- do lakehouse_patterns.require_sortable(
        columns, lakehouse_patterns._snapshot_checked_columns(columns), 'check_cols of a snapshot'
    ) -%}
{% endmacro %}


{% macro _snapshot_require_column(columns, name, rule) %}
    {#- The column that an option names, as the query spells it. -#}
    {%- set known = lakehouse_patterns._snapshot_column(columns, name) -%}
    {%- do lakehouse_patterns.require(
        known is not none,
        rule ~ ", got '" ~ name ~ "'; the query has: " ~ (columns | join(', '))
    ) -%}
    {{ return(known) }}
{% endmacro %}


{% macro _snapshot_checked_columns(columns) %}
    {%- set checked = [] -%}
    {%- set names = columns if config.get('check_cols') == 'all'
        else lakehouse_patterns.as_list(config.get('check_cols')) -%}
    {%- for name in names -%}
        {%- do checked.append(lakehouse_patterns._snapshot_require_column(
            columns, name, "check_cols of a snapshot must be 'all' or columns of its query"
        )) -%}
    {%- endfor -%}
    {{ return(checked) }}
{% endmacro %}


{% macro _snapshot_column(columns, name) %}
    {#- A column as a relation spells it, whether an option quotes it or not; none for an expression. -#}
    {{ return(
        lakehouse_patterns.column_name(columns, name)
        or lakehouse_patterns.column_name(columns, name | replace('`', ''))
    ) }}
{% endmacro %}


{% macro _snapshot_key_columns(unique_key) %}
    {#- The columns in which dbt keeps the key while it compares. -#}
    {%- if unique_key is string -%}
        {{ return(['dbt_unique_key']) }}
    {%- endif -%}
    {%- set names = [] -%}
    {%- for name in unique_key -%}
        {%- do names.append('dbt_unique_key_' ~ loop.index) -%}
    {%- endfor -%}
    {{ return(names) }}
{% endmacro %}


{% macro _is_guarded_snapshot() %}
    {#- For dbt's macros that get no strategy. -#}
    {{ return((config.get('strategy') or '').startswith('lakehouse_patterns.')) }}
{% endmacro %}


{% macro _snapshot_quoted(columns, name) %}
    {#- A column of the query, quoted. Other texts are SQL expressions, which dbt allows in `unique_key`. -#}
    {%- set known = lakehouse_patterns._snapshot_column(columns, name) -%}
    {{ return(name if known is none else lakehouse_patterns.quoted_name(known)) }}
{% endmacro %}


{% macro _snapshot_stored_columns(target_exists) %}
    {{ return(lakehouse_patterns.types_of(adapter.get_columns_in_relation(this)) if target_exists else {}) }}
{% endmacro %}


{% macro _snapshot_stored_time(snapshotted_rel, target_exists) %}
    {#- The stored `updated_at`, which a version that began at a run's start still has; the beginning without it. -#}
    {%- set begins = snapshotted_rel ~ '.' ~ lakehouse_patterns._snapshot_columns().dbt_valid_from -%}
    {%- set known = lakehouse_patterns._snapshot_column(
        lakehouse_patterns._snapshot_stored_columns(target_exists), config.get('updated_at')
    ) -%}
    {%- if known is none -%}
        {{ return(begins) }}
    {%- endif -%}
    {{ return('coalesce(' ~ lakehouse_patterns.quoted_name(known, snapshotted_rel) ~ ', ' ~ begins ~ ')') }}
{% endmacro %}


{% macro _snapshot_values_differ(columns, snapshotted_rel, current_rel, target_exists) %}
    {#- Whether a column of check_cols differs. A column that the table lacks differs in all rows. -#}
    {%- set stored, conditions = lakehouse_patterns._snapshot_stored_columns(target_exists), [] -%}
    {%- for known in lakehouse_patterns._snapshot_checked_columns(columns) -%}
        {%- if lakehouse_patterns.column_name(stored, known) is none -%}
            {{ return('true') }}
        {%- endif -%}
        {%- do conditions.append(
            'not ' ~ lakehouse_patterns.quoted_name(known, snapshotted_rel) ~ ' <=> '
            ~ lakehouse_patterns.quoted_name(known, current_rel)
        ) -%}
    {%- endfor -%}
    {{ return('(' ~ (conditions | join(' or ')) ~ ')') }}
{% endmacro %}


{% macro _snapshot_strategy(columns, row_changed, target_exists) %}
    {#-
        The dictionary that dbt's snapshots work with. The checks of a row sit in its version's id, which dbt computes
        once for each row of the extract, and the beginning of its version is a column of _snapshot_source.
    -#}
    {%- set key, nulls, texts, fields = [], [], [], [] -%}
    {%- set updated_at = lakehouse_patterns._snapshot_quoted(columns, config.get('updated_at')) -%}
    {%- set begins = 'lakehouse_patterns_begins_at' if target_exists else updated_at -%}
    {%- for name in lakehouse_patterns.as_list(config.get('unique_key')) -%}
        {%- do key.append(lakehouse_patterns._snapshot_quoted(columns, name)) -%}
        {%- do texts.append('cast(' ~ key[-1] ~ ' as string)') -%}
    {%- endfor -%}
    {#- As JSON no two keys have one text: casts to string give that of X'FF' to X'FE', and of ['a, b'] to ['a', 'b']. -#}
    {%- for expression in key + [begins] -%}
        {%- do fields.append("'" ~ loop.index ~ "', " ~ expression) -%}
    {%- endfor -%}
    {%- for name in key + [updated_at] -%}
        {%- do nulls.append(name ~ ' is null') -%}
    {%- endfor -%}
    {{ return({
        'unique_key': key[0] if config.get('unique_key') is string else key,
        'updated_at': begins,
        'lakehouse_patterns_updated_at': updated_at,
        'row_changed': row_changed,
        'hard_deletes': 'invalidate',
        'invalidate_hard_deletes': true,
        'scd_id': 'case when ' ~ (nulls | join(' or '))
            ~ " then raise_error('a row of the snapshot has NULL in its unique_key or updated_at: remove it in the query')"
            ~ ' when count(*) over (partition by ' ~ (key | join(', ')) ~ ') > 1'
            ~ " then raise_error(concat('the query of the snapshot gives a key more than once: ', "
            ~ (texts | join(", ', ', ")) ~ ", '; keep one row of each key'))"
            ~ ' else md5(' ~ lakehouse_patterns.json_text('named_struct(' ~ (fields | join(', ')) ~ ')') ~ ') end',
    }) }}
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
