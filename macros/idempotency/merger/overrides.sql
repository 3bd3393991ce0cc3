{#-
    Merger: applies an increment to a table by key, deletions included, in one MERGE.

    It works on `materialized='incremental'` with `incremental_strategy='merge'`: dbt asks for the SQL that creates
    the table and for the SQL that merges a batch into it, and the overrides below answer for a model that has options
    under `meta.lakehouse_patterns.merger`. For any other model they return what the adapter that runs gives
    (shared/adapters.sql).

    What dbt-spark's merge lacks, and why it can't be added around it:
    - a branch for deletions, and the guard that keeps an unknown key's deletion from being inserted;
    - one row a key: Delta refuses two changes of a stored key, and silently inserts both of a new one;
    - NULL keys: `=` never matches them, so that every run would insert them again;
    - an order: an old change that comes late must not win;
    - literal partition values in the ON clause: `target.day = source.day` alone prunes nothing.

    Files: overrides.sql (what dbt calls), options.sql, pruning.sql, batch.sql and merge.sql (the statement's parts).
    The last four render SQL alone; python_jobs/shared/delta/merge.py calls them too.
-#}

{% macro spark__create_table_as(temporary, relation, compiled_code, language='sql') %}
    {#- First load and full refresh: the same rules as in a merge, there is only nothing to merge with. -#}
    {%- set options = lakehouse_patterns.options('merger') -%}
    {%- if options is not none -%}
        {%- do lakehouse_patterns._merger_require_model(language) -%}
        {%- do lakehouse_patterns.require_no_sample('meta.lakehouse_patterns.merger') -%}
    {%- endif -%}
    {%- if options is none or temporary -%}
        {{ return(lakehouse_patterns.adapter_macro('create_table_as')(temporary, relation, compiled_code, language)) }}
    {%- endif -%}

    {%- do lakehouse_patterns.require_no_emptying(relation, load_relation(relation)) -%}
    {%- set batch = lakehouse_patterns.batch_view(relation) -%}
    {%- call statement('create_batch_view') -%}
        {{ create_temporary_view(batch, compiled_code) }}
    {%- endcall -%}
    {%- set merger = lakehouse_patterns._merger_of_batch(options, relation, batch) -%}
    {{ return(dbt.spark__create_table_as(
        false, relation, lakehouse_patterns._merger_first_load(merger, batch), language
    )) }}
{% endmacro %}


{% macro spark__get_merge_sql(target, source, unique_key, dest_columns, incremental_predicates) %}
    {%- set options = lakehouse_patterns.options('merger') -%}
    {%- if options is none -%}
        {{ return(lakehouse_patterns.adapter_macro('get_merge_sql')(
            target, source, unique_key, dest_columns, incremental_predicates
        )) }}
    {%- endif -%}

    {%- set merger = lakehouse_patterns._merger_of_batch(options, target, source) -%}
    {%- set columns = lakehouse_patterns._merger_written_columns(
        merger, target, lakehouse_patterns.column_types(target)
    ) -%}
    {{ return(lakehouse_patterns._merger_merge(
        merger,
        source,
        target,
        columns,
        {'is_empty': true} if lakehouse_patterns.is_empty_run()
        else lakehouse_patterns._merger_look_up(merger, source, target),
        incremental_predicates or []
    )) }}
{% endmacro %}


{% macro spark__process_schema_changes(on_schema_change, source_relation, target_relation) %}
    {#-
        dbt takes the types of new columns from `describe`, which cuts a long struct short. Delta drops no columns for
        dbt-spark's `sync_all_columns` and changes no types: the batch is refused before a column is added.
    -#}
    {%- if on_schema_change not in ['append_new_columns', 'sync_all_columns']
        or lakehouse_patterns.options('merger') is none -%}
        {{ return(lakehouse_patterns.adapter_macro('process_schema_changes')(
            on_schema_change, source_relation, target_relation
        )) }}
    {%- endif -%}
    {%- set stored = lakehouse_patterns.column_types(target_relation) -%}
    {%- set given = lakehouse_patterns.column_types(source_relation) -%}
    {%- set differences = lakehouse_patterns.schema_differences(stored, given) -%}
    {%- if on_schema_change == 'sync_all_columns' -%}
        {%- do lakehouse_patterns.require_no_differences(target_relation, differences.unlike) -%}
    {%- endif -%}
    {%- do lakehouse_patterns.add_columns(target_relation, stored, differences.added) -%}
{% endmacro %}


{% macro spark__persist_constraints(relation, model) %}
    {%- if lakehouse_patterns.options('merger') is none -%}
        {{ return(lakehouse_patterns.adapter_macro('persist_constraints')(relation, model)) }}
    {%- endif -%}
    {%- do lakehouse_patterns.persist_table_constraints(relation) -%}
{% endmacro %}


{% macro spark__persist_docs(relation, model, for_relation, for_columns) %}
    {%- if lakehouse_patterns.options('merger') is none -%}
        {{ return(lakehouse_patterns.adapter_macro('persist_docs')(relation, model, for_relation, for_columns)) }}
    {%- endif -%}
    {%- do lakehouse_patterns.persist_comments(relation) -%}
{% endmacro %}


{% macro _merger_of_batch(options, relation, batch) %}
    {#- The checked options. The contract goes first: a batch that breaks it leaves nothing in quarantine. -#}
    {%- do lakehouse_patterns.require_contract(batch) -%}
    {%- set merger = lakehouse_patterns._merger(options, relation, lakehouse_patterns.column_types(batch)) -%}
    {%- do lakehouse_patterns.quarantine_incomplete(merger, batch) -%}
    {{ return(merger) }}
{% endmacro %}


{% macro _merger_require_model(language) %}
    {%- for name, value, needed in [
        ('materialized', config.get('materialized'), 'incremental'),
        ('incremental_strategy', config.get('incremental_strategy'), 'merge'),
        ('file_format', config.get('file_format'), 'delta'),
        ('language', language, 'sql')
    ] -%}
        {%- do lakehouse_patterns.require(
            value == needed, "meta.lakehouse_patterns.merger needs " ~ name ~ "='" ~ needed ~ "', got '" ~ value ~ "'"
        ) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require_supported_configs('merger', 'meta.lakehouse_patterns.merger') -%}
{% endmacro %}


{% macro _merger_require_dispatch(node) %}
    {#-
        For the on-run-start hook. In a project without our `dispatch`, or with an override of its own, dbt never comes
        here and would ignore the options silently.
    -#}
    {#- dbt reads the names of dispatched macros without running anything: they must be literals. -#}
    {%- for name, found in [
        ('get_merge_sql', adapter.dispatch('get_merge_sql', 'dbt')),
        ('create_table_as', adapter.dispatch('create_table_as', 'dbt')),
        ('process_schema_changes', adapter.dispatch('process_schema_changes', 'dbt')),
        ('persist_constraints', adapter.dispatch('persist_constraints', 'dbt')),
        ('persist_docs', adapter.dispatch('persist_docs', 'dbt'))
    ] -%}
        {%- set package = found.macro.package_name -%}
        {%- do lakehouse_patterns.require(
            package == 'lakehouse_patterns',
            node.name ~ " has options under meta.lakehouse_patterns.merger, but " ~ name ~ " comes from "
            ~ package ~ ": dispatch in dbt_project.yml must name lakehouse_patterns before dbt"
        ) -%}
    {%- endfor -%}
{% endmacro %}
