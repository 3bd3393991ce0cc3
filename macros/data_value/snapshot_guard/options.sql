{#- Guarded snapshots: the options, the query's columns and dbt's own, checked before the first version is written. -#}

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
    {%- do lakehouse_patterns.require_free_names(columns, own, "dbt's snapshot") -%}
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


{% macro _snapshot_quoted(columns, name) %}
    {#- A column of the query, quoted. Other texts are SQL expressions, which dbt allows in `unique_key`. -#}
    {%- set known = lakehouse_patterns._snapshot_column(columns, name) -%}
    {{ return(name if known is none else lakehouse_patterns.quoted_name(known)) }}
{% endmacro %}
