{#-
    dbt's own snapshot strategies behind checks: `strategy: lakehouse_patterns.timestamp` (or `.check`).
    What the checks refuse goes wrong silently in a snapshot on Delta; each message says how. With `check_cols` the
    timestamp strategy adds a version only when the time is newer and one of these columns differs.
-#}

{% macro snapshot_timestamp_strategy(node, snapshotted_rel, current_rel, model_config, target_exists) %}
    {{ return(adapter.dispatch('snapshot_timestamp_strategy', 'lakehouse_patterns')(
        node, snapshotted_rel, current_rel, model_config, target_exists
    )) }}
{% endmacro %}

{% macro default__snapshot_timestamp_strategy(node, snapshotted_rel, current_rel, model_config, target_exists) %}
    {%- do lakehouse_patterns._require_safe_snapshot() -%}
    {%- set strategy = dbt.snapshot_timestamp_strategy(
        node, snapshotted_rel, current_rel, model_config, target_exists
    ) -%}
    {%- set row_changed = strategy.row_changed -%}
    {%- if config.get('check_cols') -%}
        {%- set content = dbt.snapshot_check_strategy(
            node, snapshotted_rel, current_rel, model_config, target_exists
        ) -%}
        {%- set row_changed = '(' ~ row_changed ~ ' and ' ~ content.row_changed ~ ')' -%}
    {%- endif -%}
    {#- dbt compares times, so a row whose time is NULL would never be seen again. -#}
    {%- do strategy.update({
        'row_changed': '(' ~ current_rel ~ '.' ~ strategy.updated_at ~ ' is null or ' ~ row_changed ~ ')',
    }) -%}
    {{ return(lakehouse_patterns._refusing_nulls(strategy)) }}
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
    {{ return(lakehouse_patterns._refusing_nulls(
        dbt.snapshot_check_strategy(node, snapshotted_rel, current_rel, model_config, target_exists)
    )) }}
{% endmacro %}


{% macro _require_safe_snapshot() %}
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
{% endmacro %}


{% macro _refusing_nulls(strategy) %}
    {#-
        dbt adds a version for a NULL key at every run. The check sits in the version's id, which dbt computes
        for each row it writes and for no other, so it costs no scan.
    -#}
    {%- set nulls = [] -%}
    {%- for name in lakehouse_patterns.as_list(strategy.unique_key) + [strategy.updated_at] -%}
        {%- do nulls.append(name ~ ' is null') -%}
    {%- endfor -%}
    {%- do strategy.update({
        'scd_id': "if(" ~ (nulls | join(' or '))
        ~ ", raise_error('a row of the snapshot has NULL in its unique_key or updated_at: remove it in the query'), "
        ~ strategy.scd_id ~ ")",
    }) -%}
    {{ return(strategy) }}
{% endmacro %}
