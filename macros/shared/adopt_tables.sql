{#-
    A lost, new or in-memory metastore must never make dbt replace a table's history with
    `create or replace table`: dbt does that for every model it finds no relation for. So before anything runs,
    each source, model and snapshot that the catalog does not know, but whose path holds a Delta log, is
    registered from its path.

    One statement looks for all the logs. A table has version 0 in its log until a checkpoint lets it be cleaned
    up, so either the one file or a checkpoint is there; the handler turns "none of the paths exists" (SQLSTATE
    42K03) into no rows and nothing else: a path that may not be read must stop the run, not create a new table.
-#}

{% macro adopt_tables() %}
    {{ return(adapter.dispatch('adopt_tables', 'lakehouse_patterns')()) }}
{% endmacro %}

{% macro default__adopt_tables() %}
    {%- if execute -%}
        {%- set unknown = lakehouse_patterns.unregistered_tables() -%}
        {%- set found = [] -%}
        {%- for root, locations in lakehouse_patterns.locations_by_root(unknown.keys()).items() -%}
            {%- for row in run_query(lakehouse_patterns.delta_logs_sql(root, locations)).rows -%}
                {%- do found.append(row[0].split(':')[-1].lstrip('/')) -%}
            {%- endfor -%}
        {%- endfor -%}
        {%- for location, relation in unknown.items() if location.split(':')[-1].lstrip('/') in found -%}
            {%- do run_query(
                'create table if not exists ' ~ relation ~ ' using delta location '
                ~ lakehouse_patterns.text_literal(location)
            ) -%}
            {#- dbt filled its cache before this hook ran. -#}
            {%- do adapter.cache_added(relation) -%}
            {%- do log('adopted ' ~ relation ~ ' from ' ~ location, info=true) -%}
        {%- endfor -%}
    {%- endif -%}
{% endmacro %}

{% macro locations_by_root(locations) %}
    {#- Root (`/`, `s3a://bucket/`) to the paths under it: a glob whose braces hold the root would be a relative path. -#}
    {%- set roots = {} -%}
    {%- for location in locations -%}
        {%- set root = modules.re.match('([a-z0-9+.-]+:(//[^/]*)?)?/', location).group(0) -%}
        {%- do roots.setdefault(root, []).append(location[root | length:]) -%}
    {%- endfor -%}
    {{ return(roots) }}
{% endmacro %}

{% macro unregistered_tables() %}
    {#- Path to relation, for each table of the project that names its path and that the catalog lacks. -#}
    {%- set tables = {} -%}
    {%- for node in graph.nodes.values() | list + graph.sources.values() | list -%}
        {%- set location = lakehouse_patterns.table_location(node) -%}
        {%- if location -%}
            {%- set known = lakehouse_patterns.existing_of(node) -%}
            {%- if known is none -%}
                {%- do tables.update({
                    location: lakehouse_patterns.relation_of(node, 'table').incorporate(is_delta=true)
                }) -%}
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

{% macro delta_logs_sql(root, paths) %}
    {#-
        Hadoop reads the path as a glob, so a folder's name must be escaped. Hadoop removes one escape when it expands the
        braces: three backslashes leave one.
    -#}
    {%- set literal = [] -%}
    {%- for path in paths -%}
        {%- do literal.append(lakehouse_patterns.literal_path(path, backslashes=3) | replace('`', '``')) -%}
    {%- endfor -%}
begin
    declare exit handler for sqlstate '42K03' begin select cast(null as string) as location where false; end;
    select distinct regexp_extract(path, '^(.*)/_delta_log/', 1) as location
    from binaryFile.`{{ root }}{{ '{' ~ literal | join(',') ~ '}' }}/_delta_log/{00000000000000000000.json,*.checkpoint*.parquet}`;
end
{% endmacro %}
