{#-
    Readiness Marker for the tables of a dbt run: one row in a ledger states that a dataset is ready, and names the
    commit of each of its tables.

    A dataset is all models, seeds and snapshots with one tag. `withdraw_readiness` is an on-run-start hook and deletes
    the row before the first table is built. `publish_readiness` is an on-run-end hook, dbt's last step, and writes the
    row when every node of the run passed. A run that dies in between leaves no row. A run that builds only some of the
    dataset's tables (`--select`, `dbt retry`) leaves no row either, because the other tables are older than their
    sources. `--empty` leaves no row, because its tables have no rows.
-#}

{% macro withdraw_readiness(dataset, location_root=none) %}
    {{ return(adapter.dispatch('withdraw_readiness', 'lakehouse_patterns')(dataset, location_root)) }}
{% endmacro %}

{% macro default__withdraw_readiness(dataset, location_root) %}
    {%- if execute and lakehouse_patterns._readiness_members(dataset, selected_resources) -%}
        {%- set ledger = lakehouse_patterns._readiness_ledger(location_root) -%}
        {#- Without a matching row the delete writes no commit. -#}
        {%- do run_query('delete from ' ~ ledger ~ ' where dataset = ' ~ lakehouse_patterns.text_literal(dataset)) -%}
    {%- endif -%}
{% endmacro %}


{% macro publish_readiness(dataset, results, location_root=none) %}
    {{ return(adapter.dispatch('publish_readiness', 'lakehouse_patterns')(dataset, results, location_root)) }}
{% endmacro %}

{% macro default__publish_readiness(dataset, results, location_root) %}
    {%- if execute -%}
        {%- set statuses, reasons = {}, [] -%}
        {%- for result in results -%}
            {%- do statuses.update({result.node.unique_id: result.status | string}) -%}
            {%- if result.status | string not in ('success', 'pass', 'warn', 'no-op') -%}
                {%- do reasons.append(result.node.name ~ ' ' ~ result.status) -%}
            {%- endif -%}
        {%- endfor -%}
        {%- if invocation_args_dict.get('empty') -%}
            {%- do reasons.append('--empty builds no rows') -%}
        {%- endif -%}
        {#-
            Tables left out by --exclude do not belong to the dataset. --select builds a part of the dataset, and so does
            `dbt retry`, which has the arguments of the run before.
        -#}
        {%- set partial = invocation_args_dict.get('select') or invocation_args_dict.get('selector') -%}
        {%- if partial or not invocation_args_dict.get('exclude') -%}
            {%- for node in lakehouse_patterns._readiness_members(dataset) if node.unique_id not in statuses -%}
                {%- do reasons.append(node.name ~ ' was not built') -%}
            {%- endfor -%}
        {%- endif -%}
        {%- set built = lakehouse_patterns._readiness_members(dataset, statuses.keys()) -%}
        {%- if built and reasons -%}
            {%- do log('readiness of ' ~ dataset ~ ' is not published: ' ~ (reasons | join(', ')), info=true) -%}
        {%- elif built -%}
            {%- do run_query(lakehouse_patterns._readiness_publish_sql(
                lakehouse_patterns._readiness_ledger(location_root),
                dataset,
                lakehouse_patterns._readiness_versions(built)
            )) -%}
            {%- do log('readiness of ' ~ dataset ~ ' is published', info=true) -%}
        {%- endif -%}
    {%- endif -%}
{% endmacro %}


{% macro _readiness_members(dataset, among=none) %}
    {#- The dataset's stored nodes; with `among` only the nodes with these unique ids. -#}
    {%- set members = [] -%}
    {%- for node in graph.nodes.values()
        if node.resource_type in ('model', 'seed', 'snapshot')
        and dataset in node.config.tags
        and node.config.materialized not in ('ephemeral', 'view')
        and (among is none or node.unique_id in among) -%}
        {%- do members.append(node) -%}
    {%- endfor -%}
    {{ return(members) }}
{% endmacro %}


{% macro _readiness_table() %}
    {{ return(api.Relation.create(
        database=database, schema=target.schema, identifier='observability_readiness', type='table'
    )) }}
{% endmacro %}


{% macro _readiness_ledger(location_root) %}
    {#- This also registers the table again after a loss of the metastore, because no node declares the table. -#}
    {%- set ledger = lakehouse_patterns._readiness_table() -%}
    {%- do run_query('create schema if not exists ' ~ ledger.without_identifier()) -%}
    {%- call statement('readiness_ledger') -%}
        create table if not exists {{ ledger }} (
            dataset string,
            run_id string,
            published_at timestamp,
            table_versions array<struct<name: string, version: bigint>>,
            format_version int
        )
        using delta
        {%- if location_root %}
        location {{ lakehouse_patterns.text_literal(location_root ~ '/' ~ ledger.identifier) }}
        {%- endif %}
    {%- endcall -%}
    {{ return(ledger) }}
{% endmacro %}


{% macro _readiness_versions(nodes) %}
    {%- set versions = {} -%}
    {%- for node in nodes | sort(attribute='name') -%}
        {%- do versions.update(
            {node.alias: lakehouse_patterns.latest_version(lakehouse_patterns.relation_of(node))}
        ) -%}
    {%- endfor -%}
    {{ return(versions) }}
{% endmacro %}


{% macro _readiness_publish_sql(ledger, dataset, versions) %}
insert into {{ ledger }}
replace where
    dataset = {{ lakehouse_patterns.text_literal(dataset) }}
select
    {{ lakehouse_patterns.text_literal(dataset) }} as dataset,
    '{{ invocation_id }}' as run_id,
    current_timestamp() as published_at,
    array(
        {%- for name, version in versions.items() %}
        named_struct('name', {{ lakehouse_patterns.text_literal(name) }}, 'version', {{ version }}L){{ ',' if not loop.last }}
        {%- endfor %}
    ) as table_versions,
    1 as format_version
{% endmacro %}
