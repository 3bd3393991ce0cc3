{#-
    Which of dbt's configs each materialization of ours honours, and a model with options of Merger: one that would have
    no effect is refused in a sentence. Hooks, tags, meta, grants and persist_docs are honoured by all. `location_root` is
    mostly set for a whole project, so that it is not refused where tables are managed ones (versioned_table, unit_tables),
    as dbt doesn't refuse it for views. `--full-refresh` and `--empty` are in
    materialization.sql, `on_schema_change` is in schema_changes.sql.
-#}

{% macro supported_configs() %}
    {{ return({
        'data_overwrite': ['contract', 'partition_by', 'tblproperties', 'options'],
        'scd2': ['contract', 'unique_key', 'partition_by', 'tblproperties', 'options'],
        'awap': ['contract', 'partition_by', 'tblproperties', 'options'],
        'versioned_table': ['contract', 'partition_by', 'tblproperties'],
        'unit_tables': ['partition_by', 'tblproperties'],
        'merger': [
            'contract', 'unique_key', 'partition_by', 'tblproperties', 'options', 'incremental_strategy',
            'incremental_predicates', 'predicates', 'merge_update_columns', 'merge_exclude_columns'
        ],
    }) }}
{% endmacro %}


{% macro refused_configs() %}
    {#- With the reason or the way out. A materialization that has one among its supported ones takes it. -#}
    {{ return({
        'incremental_strategy': 'it belongs to dbt\'s incremental models',
        'incremental_predicates': 'it limits the merge of dbt\'s incremental models',
        'predicates': 'it limits the merge of dbt\'s incremental models',
        'merge_update_columns': 'it belongs to the merge of dbt\'s incremental models',
        'merge_exclude_columns': 'it belongs to the merge of dbt\'s incremental models',
        'unique_key': 'rows are replaced as a whole and never by key',
        'contract': 'a unit that an operation makes would lack its constraints',
        'partition_by': 'the table is laid out by the materialization',
        'tblproperties': 'the table\'s properties are those of the materialization',
        'clustered_by': 'Delta has no buckets',
        'buckets': 'Delta has no buckets',
        'sql_header': 'Spark takes one statement at a time, use a pre_hook',
        'options': 'there is no table of its own to give them to',
    }) }}
{% endmacro %}


{% macro require_supported_configs(materialization, what=none) %}
    {%- set what = what or "materialized='" ~ materialization ~ "'" -%}
    {%- set supported = lakehouse_patterns.supported_configs()[materialization] -%}
    {%- for name, reason in lakehouse_patterns.refused_configs().items() if name not in supported -%}
        {%- set value = config.get(name) -%}
        {%- set is_set = (value or {}).enforced if name == 'contract' else value -%}
        {%- do lakehouse_patterns.require(
            not is_set,
            what ~ ' has no use for ' ~ name ~ ': ' ~ reason ~ '; leave it out of ' ~ this
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro table_clauses(configuration, own) %}
    {#-
        How a table is laid out, between its name and its query: a node's `partition_by` and `tblproperties`, and the
        materialization's own properties, which a model can't change.
    -#}
    {%- set properties = {} -%}
    {%- for name, value in (configuration.tblproperties or {}).items() -%}
        {%- do lakehouse_patterns.require(
            name not in own,
            "tblproperties has '" ~ name ~ "', which materialized='" ~ configuration.materialized
            ~ "' sets itself: leave it out"
        ) -%}
        {%- do properties.update({name: value}) -%}
    {%- endfor -%}
    {%- do properties.update(own) -%}
    {%- set partitions = lakehouse_patterns.quoted_names(
        lakehouse_patterns.as_list(configuration.partition_by)
    ) -%}
    {{ return(
        'using delta'
        ~ ('\npartitioned by (' ~ (partitions | join(', ')) ~ ')' if partitions else '')
        ~ ('\n' ~ lakehouse_patterns.property_list(properties) if properties else '')
    ) }}
{% endmacro %}
