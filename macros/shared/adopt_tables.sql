{#-
    A lost, new or in-memory metastore must never make dbt replace a table's history with
    `create or replace table`: dbt does that for every model it finds no relation for. So before anything runs,
    each source, model and snapshot that the catalog does not know, but whose path holds a Delta log, is
    registered from its path.

    One statement looks for all the logs. A table has version 0 in its log until a checkpoint lets it be cleaned
    up, so either the one file or a checkpoint is there; the handler turns "none of the paths exists" (SQLSTATE
    42K03) into no rows and nothing else: a path that may not be read must stop the run, not start a table anew.
-#}

{% macro adopt_tables() %}
    {{ return(adapter.dispatch('adopt_tables', 'lakehouse_patterns')()) }}
{% endmacro %}

{% macro default__adopt_tables() %}
    {%- if execute -%}
        {%- set unknown = lakehouse_patterns.unregistered_tables() -%}
        {%- if unknown -%}
            {%- set found = run_query(lakehouse_patterns.delta_logs_sql(unknown.keys() | list)) -%}
            {%- for row in found.rows -%}
                {%- for location, relation in unknown.items()
                    if location.split(':')[-1].lstrip('/') == row[0].split(':')[-1].lstrip('/') -%}
                    {%- do run_query(
                        'create table if not exists ' ~ relation ~ " using delta location '" ~ location ~ "'"
                    ) -%}
                    {%- do log('adopted ' ~ relation ~ ' from ' ~ location, info=true) -%}
                {%- endfor -%}
            {%- endfor -%}
            {%- if found.rows | length -%}
                {%- do lakehouse_patterns.cache_relations(unknown.values() | list) -%}
            {%- endif -%}
        {%- endif -%}
    {%- endif -%}
{% endmacro %}

{% macro unregistered_tables() %}
    {#- Path to relation, for each table of the project that names its path and that the catalog lacks. -#}
    {%- set tables = {} -%}
    {%- for node in graph.nodes.values() | list + graph.sources.values() | list -%}
        {%- set location = lakehouse_patterns.table_location(node) -%}
        {%- if location -%}
            {%- set known = adapter.get_relation(none, node.schema, node.alias or node.identifier) -%}
            {%- if known is none -%}
                {%- do tables.update(
                    {location: api.Relation.create(schema=node.schema, identifier=node.alias or node.identifier)}
                ) -%}
            {%- endif -%}
        {%- endif -%}
    {%- endfor -%}
    {{ return(tables) }}
{% endmacro %}

{% macro table_location(node) %}
    {%- if node.resource_type == 'source' -%}
        {{ return((node.external or {}).get('location')) }}
    {%- elif node.resource_type in ('model', 'snapshot') and node.config.get('location_root')
        and node.config.materialized not in ('view', 'ephemeral') -%}
        {{ return(node.config.location_root ~ '/' ~ node.alias) }}
    {%- else -%}
        {{ return(none) }}
    {%- endif -%}
{% endmacro %}

{% macro delta_logs_sql(locations) %}
begin
    declare exit handler for sqlstate '42K03' begin select cast(null as string) as location where false; end;
    select distinct regexp_extract(path, '^(.*)/_delta_log/', 1) as location
    from binaryFile.`{{ '{' ~ locations | join(',') ~ '}' }}/_delta_log/{00000000000000000000.json,*.checkpoint*.parquet}`;
end
{% endmacro %}

{% macro cache_relations(relations) %}
    {#- dbt has filled its cache before the hook runs; tell it what the catalog holds now. -#}
    {%- set schemas = relations | map(attribute='schema') | unique | list -%}
    {%- for schema in schemas -%}
        {%- for relation in adapter.list_relations_without_caching(api.Relation.create(schema=schema)) -%}
            {%- do adapter.cache_added(relation) -%}
        {%- endfor -%}
    {%- endfor -%}
{% endmacro %}
