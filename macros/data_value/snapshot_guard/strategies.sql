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

    Files: strategies.sql (what dbt calls a strategy, and its conditions), options.sql (a snapshot's options and columns,
    checked), overrides.sql (dbt's statements, and the rows that it merges).
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
    {#- No two keys have one such text: casts to string give that of X'FF' to X'FE', and of ['a, b'] to ['a', 'b']. -#}
    {%- for expression in key + [begins] -%}
        {%- do fields.append((loop.index | string, expression)) -%}
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
            ~ ' else md5(' ~ lakehouse_patterns.exact_text(fields) ~ ') end',
    }) }}
{% endmacro %}
