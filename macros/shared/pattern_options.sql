{#-
    Options of a model stand under `meta.lakehouse_patterns.<pattern>`. A pattern of one materialization has two names:
    its own and the materialization's.
-#}

{% macro pattern_keys() %}
    {#- {pattern: what has such options: a materialization, or none for any table} -#}
    {{ return({
        'awap': 'awap',
        'compactor': none,
        'data_overwrite': 'data_overwrite',
        'fast_metadata_cleaner': 'unit_tables',
        'full_loader': 'versioned_table',
        'incremental_loader': none,
        'merger': 'incremental',
        'scd2': 'scd2',
    }) }}
{% endmacro %}


{% macro pattern_options() %}
    {#- {pattern: the options that it knows} -#}
    {{ return({
        'awap': ['audits', 'input_audits', 'period', 'is_deleted', 'from', 'to', 'history'],
        'compactor': ['mode', 'min_files', 'small_file_mb', 'where'],
        'data_overwrite': ['where'],
        'fast_metadata_cleaner': ['unit', 'clean'],
        'full_loader': ['key', 'not_null', 'min_rows', 'max_shrink_percent', 'keep_versions', 'immutable'],
        'incremental_loader': [
            'column', 'window_from', 'window_to', 'overlap', 'bootstrap_from', 'watermark_column'
        ],
        'merger': ['deletes', 'is_deleted', 'sequence', 'on_null_key', 'nullable_key', 'keep_on_null', 'prune_by'],
        'scd2': ['changed_at', 'sequence', 'is_deleted', 'tracked_columns', 'on_null_key'],
    }) }}
{% endmacro %}


{% macro require_pattern_options(pattern, given, what=none) %}
    {%- do lakehouse_patterns.require_known_keys(
        what or 'meta.lakehouse_patterns.' ~ pattern, given, lakehouse_patterns.pattern_options()[pattern]
    ) -%}
{% endmacro %}


{% macro options(pattern) %}
    {#- The running model's options of a pattern; none if it has none. -#}
    {{ return(lakehouse_patterns.options_in(config.get('meta'), pattern)) }}
{% endmacro %}


{% macro options_of(node, pattern) %}
    {#- The options of a pattern of a node in dbt's graph; none if it has none. -#}
    {{ return(lakehouse_patterns.options_in(node.config.get('meta'), pattern)) }}
{% endmacro %}


{% macro options_in(meta, pattern) %}
    {%- set given = (meta or {}).get('lakehouse_patterns') or {} -%}
    {%- for name in lakehouse_patterns.names_of_pattern(pattern) if given.get(name) is not none -%}
        {%- do lakehouse_patterns.require_proved_adapter('meta.lakehouse_patterns.' ~ name) -%}
        {{ return(given[name]) }}
    {%- endfor -%}
    {{ return(none) }}
{% endmacro %}


{% macro names_of_pattern(pattern) %}
    {#- `full_loader` is also `versioned_table`, and the other way round. -#}
    {%- set names = [pattern] -%}
    {%- for key, materialization in lakehouse_patterns.pattern_keys().items()
        if materialization not in (none, 'incremental') and pattern in (key, materialization) -%}
        {%- do names.extend([key, materialization]) -%}
    {%- endfor -%}
    {{ return(names | unique | list) }}
{% endmacro %}
