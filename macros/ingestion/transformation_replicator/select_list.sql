{#-
    Transformation Replicator in SQL: the select list of a replica that holds only the columns that may leave.

    The contract is dbt's YAML of the source's columns (or the argument `contract`, in the form of
    python_jobs/ingestion/data_contract.py, whose rules these macros share). An unlisted column is withheld, and so is a
    column tagged `pii` without a `transform`. Nested fields are listed as columns with Delta's names: `address.city`,
    `devices.element.version`, `settings.value.theme`.

    When the relation exists, its columns are compared with the contract while the model is compiled. The SQL names each
    selected column, so that columns added after the compilation are withheld too.
-#}

{% macro transformation_replicator(relation, contract=none, on_unknown='fail') %}
    {{ return(adapter.dispatch('transformation_replicator', 'lakehouse_patterns')(relation, contract, on_unknown)) }}
{% endmacro %}

{% macro default__transformation_replicator(relation, contract, on_unknown) %}
    {%- do lakehouse_patterns.require_one_of('on_unknown', on_unknown, ['fail', 'drop']) -%}
    {%- if not execute -%}
        {{ return('*') }}
    {%- endif -%}
    {%- do lakehouse_patterns._replica_require_model() -%}
    {%- set root = lakehouse_patterns._replica_contract(relation, contract) -%}
    {%- set unknown = lakehouse_patterns._replica_unknown(relation, root) -%}
    {%- if unknown and on_unknown == 'drop' -%}
        {%- do log('withheld from the replica of ' ~ relation ~ ', not listed: ' ~ unknown | join(', '), info=true) -%}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        not unknown or on_unknown == 'drop',
        'the contract of ' ~ relation ~ " doesn't list " ~ (unknown | join(', '))
        ~ ": list what may leave, tag what may not, or withhold it with on_unknown='drop'"
    ) -%}
    {%- set columns = [] -%}
    {%- for node in root.children.values() if lakehouse_patterns._replica_leaves(node) -%}
        {%- set quoted = lakehouse_patterns.quoted_name(node.name) -%}
        {%- do columns.append(lakehouse_patterns._replica_expression(node, quoted, 0) ~ ' as ' ~ quoted) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(columns, 'by the contract of ' ~ relation ~ ' nothing may leave') -%}
    {{ return(columns | join(',\n    ')) }}
{% endmacro %}

{% macro _replica_require_model() %}
    {%- if model is defined and model.resource_type == 'model' and config.get('file_format') == 'delta'
        and config.get('materialized') not in ['view', 'ephemeral'] -%}
        {%- do lakehouse_patterns.require(
            (config.get('tblproperties') or {}).get('delta.dataSkippingNumIndexedCols') | string == '0',
            'a replica needs tblproperties={\'delta.dataSkippingNumIndexedCols\': \'0\'}: statistics would keep values '
            ~ 'in its log after they are withheld'
        ) -%}
    {%- endif -%}
{% endmacro %}

{% macro transformation_replicator_purge() %}
    {{ return(adapter.dispatch('transformation_replicator_purge', 'lakehouse_patterns')()) }}
{% endmacro %}

{% macro default__transformation_replicator_purge() %}
    {#- Post-hook: remove the files of older versions, which may hold columns that were reclassified later. -#}
    {#- `--empty` removes nothing. -#}
    {%- if execute and not lakehouse_patterns.is_empty_run() -%}
        {%- do lakehouse_patterns.require_no_retention(this, 'transformation_replicator_purge') -%}
        {%- do run_query('vacuum ' ~ this ~ ' retain 0 hours') -%}
    {%- endif -%}
{% endmacro %}
