{#-
    SCD Type 2 from a change feed.

    Every row of the target stands for a run of source changes and keeps them in `changes`, so the feed can be
    rebuilt from the table: a late change is put where it belongs, both neighbours are repaired, and the result
    depends on the set of changes alone, never on how they were split into batches or on the batches' order.
    Without that list a late B between A at 1 and an unchanged A at 5 could not know that A returns at 5.

    A batch rebuilds the chains of its own keys and writes the rows that differ in one MERGE.

    Files: scd2.sql (the materialization), options.sql (a model's options and columns, checked), schema.sql (added and
    absent columns), changes.sql (the changes of the batch and of the table), versions.sql (the rows that they make),
    merge.sql (the MERGE). as_of.sql and invariants.sql read and test the versions of any table.
-#}

{% materialization scd2, adapter='spark', supported_languages=['sql'] %}
    {%- set context = lakehouse_patterns.start_materialization('scd2', replaces_others=true) -%}
    {%- do lakehouse_patterns._scd2_require_options(context.options) -%}
    {%- set existing = context.existing -%}
    {%- set creates = existing is none or existing.is_view or should_full_refresh() -%}
    {%- do lakehouse_patterns.require(
        creates or existing.is_delta, this ~ ' is not a Delta table; rebuild it with --full-refresh'
    ) -%}
    {%- if creates -%}
        {%- do lakehouse_patterns.require_no_emptying(this, existing) -%}
    {%- endif -%}
    {{ run_hooks(pre_hooks) }}

    {%- do lakehouse_patterns.stage_batch(context, compiled_code, checks_contract=false) -%}
    {%- set history = lakehouse_patterns._scd2_history(context) -%}
    {%- do lakehouse_patterns._scd2_require_contract(history, context.batch) -%}
    {%- if creates -%}
        {%- do lakehouse_patterns.drop_other_relation(existing) -%}
        {%- do lakehouse_patterns.quarantine_incomplete(history.incomplete, context.batch) -%}
        {%- call statement('main') -%}
            {{ create_table_as(false, this, lakehouse_patterns._scd2_rows(history, context.batch)) }}
        {%- endcall -%}
        {%- do lakehouse_patterns.persist_table_constraints(this) -%}
    {%- elif context.is_empty -%}
        {%- do lakehouse_patterns.publish_nothing(context) -%}
    {%- else -%}
        {%- do lakehouse_patterns.persist_table_constraints(this) -%}
        {%- do lakehouse_patterns._scd2_follow_schema(history, this) -%}
        {%- do lakehouse_patterns.quarantine_incomplete(history.incomplete, context.batch) -%}
        {%- call statement('main') -%}
            {{ lakehouse_patterns._scd2_merge(history, context.batch, this) }}
        {%- endcall -%}
    {%- endif -%}

    {%- do lakehouse_patterns.finish_materialization(context, replaced=creates) -%}
    {{ run_hooks(post_hooks) }}
    {{ return({'relations': [this]}) }}
{% endmaterialization %}
