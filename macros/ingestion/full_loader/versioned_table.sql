{#-
    Full Loader in SQL: each run writes the whole dataset to `<model>_<yyyymmdd>` and checks this table. Only then one
    statement makes the view `<model>` show the table.

    The view names the commit that it shows (`version as of`), not only the table. The exposed version can therefore be
    loaded again, and that load refused, without any effect for readers. The version tables keep removed files and the
    log for ten years, so that VACUUM and the log's clean-up delete nothing that the view shows: a version is dropped as
    a whole.

    Version tables are managed tables, whatever `location_root` is, because dropping an external table leaves its files.

    With `immutable` it is Proxy: a version is named after the run's start, written once and never dropped.

    Tables without our properties are never changed, even if they are named like a version.

    Files: versioned_table.sql (the load), options.sql (names of versions and a model's options), expose.sql (checks, the
    view and the rollback).
-#}

{% materialization versioned_table, adapter='spark', supported_languages=['sql'] %}
    {%- set context = lakehouse_patterns.start_materialization('versioned_table', exposes='view') -%}
    {%- set options = lakehouse_patterns._full_loader_options(context.options) -%}
    {%- set version = lakehouse_patterns._full_loader_version(options) -%}
    {{ run_hooks(pre_hooks) }}

    {%- do lakehouse_patterns.stage_batch(context, compiled_code) -%}
    {%- do lakehouse_patterns.require_sortable(context.types, options.key, 'key of full_loader') -%}
    {%- if context.is_empty -%}
        {%- if context.existing is none -%}
            {%- do run_query(lakehouse_patterns._full_loader_empty_view_sql(this, context.types)) -%}
        {%- endif -%}
        {%- do lakehouse_patterns.publish_nothing(context) -%}
    {%- else -%}
        {%- set table = lakehouse_patterns._full_loader_table(this, version) -%}
        {%- do lakehouse_patterns._full_loader_require_own(table, version) -%}
        {%- call statement('main') -%}
            {{ lakehouse_patterns._full_loader_create_sql(table, version, options.immutable, context.batch) }}
        {%- endcall -%}
        {%- do lakehouse_patterns.persist_table_constraints(table) -%}
        {%- do lakehouse_patterns._full_loader_publish(options, context, version) -%}
    {%- endif -%}

    {%- do lakehouse_patterns.finish_materialization(context) -%}
    {{ run_hooks(post_hooks) }}
    {{ return({'relations': [this.incorporate(type='view')]}) }}
{% endmaterialization %}


{% macro _full_loader_create_sql(table, version, immutable, batch) %}
    {%- set own = {
        'delta.deletedFileRetentionDuration': 'interval 3650 days',
        'delta.logRetentionDuration': 'interval 3650 days',
        'lakehouse_patterns.full_loader.version': version
    } -%}
    {%- do own.update({'delta.appendOnly': 'true'}) if immutable -%}
create{{ '' if immutable else ' or replace' }} table {{ table }}
{{ lakehouse_patterns.table_clauses(model.config, own) }}
as
select *
from {{ batch }}
{%- endmacro %}


{% macro _full_loader_require_own(table, version) %}
    {#- `create or replace` would replace a table that something else created. -#}
    {%- do lakehouse_patterns.require(
        not lakehouse_patterns.is_in_catalog(table) or lakehouse_patterns._full_loader_version_of(table) == version,
        table ~ ' exists and was not created by versioned_table: rename or drop it'
    ) -%}
{% endmacro %}


{% macro _full_loader_publish(options, context, version) %}
    {%- set view, is_there = context.relation, context.existing is not none -%}
    {%- set shown = lakehouse_patterns._full_loader_version_of(view) if is_there else '' -%}
    {%- if shown > version -%}
        {%- do log(
            lakehouse_patterns._full_loader_table(view, version) ~ ' was loaded; ' ~ view
            ~ ' keeps showing the newer version ' ~ shown,
            info=true
        ) -%}
    {%- else -%}
        {%- do lakehouse_patterns._full_loader_expose(options, view, version, is_there, model) -%}
    {%- endif -%}
    {%- if not options.immutable -%}
        {%- do lakehouse_patterns._full_loader_drop_old(options, view, [version, shown] | max) -%}
    {%- endif -%}
{% endmacro %}
