{#-
    Readiness Marker for the tables of a dbt run: one row in a ledger states that a dataset is ready, and names the
    commit of each of its tables.

    A dataset is all models, seeds and snapshots with one tag. `withdraw_readiness` is an on-run-start hook and withdraws
    the row before the first table is built: it gives the row another dataset's name. `publish_readiness` is an
    on-run-end hook, dbt's last step, and writes the row when every model and test of the dataset passed; other nodes
    don't count. A run that dies in between leaves no row. A run that builds only some of the dataset's tables
    (`--select`, `dbt retry`) leaves no row either, because the other tables are older than their sources. `--empty`
    leaves no row, because its tables have no rows, and neither does `--sample`, whose tables have a part of them. A run
    that builds none of the tables, because a model above them failed, gives the row its name back.
-#}

{% macro withdraw_readiness(dataset, location_root=none) %}
    {{ return(adapter.dispatch('withdraw_readiness', 'lakehouse_patterns')(dataset, location_root)) }}
{% endmacro %}

{% macro default__withdraw_readiness(dataset, location_root) %}
    {%- if execute and lakehouse_patterns._readiness_members(dataset, selected_resources) -%}
        {%- set ledger = lakehouse_patterns._readiness_ledger(location_root) -%}
        {#- A row that a killed run withdrew doesn't come back. Without a matching row a statement writes no commit. -#}
        {%- do run_query(
            'delete from ' ~ ledger ~ ' where dataset = ' ~ lakehouse_patterns._readiness_withdrawn(dataset)
        ) -%}
        {%- do run_query(
            'update ' ~ ledger ~ ' set dataset = ' ~ lakehouse_patterns._readiness_withdrawn(dataset)
            ~ ' where dataset = ' ~ lakehouse_patterns.text_literal(dataset)
        ) -%}
    {%- endif -%}
{% endmacro %}


{% macro _readiness_withdrawn(dataset) %}
    {{ return(lakehouse_patterns.text_literal(dataset ~ ', withdrawn')) }}
{% endmacro %}


{% macro publish_readiness(dataset, results, location_root=none) %}
    {{ return(adapter.dispatch('publish_readiness', 'lakehouse_patterns')(dataset, results, location_root)) }}
{% endmacro %}

{% macro default__publish_readiness(dataset, results, location_root) %}
    {%- if execute -%}
        {%- set own = lakehouse_patterns._readiness_members(dataset, stored=false) | map(attribute='unique_id') | list -%}
        {%- set touched, statuses, reasons = [], {}, [] -%}
        {%- for result in results -%}
            {%- set status = result.status | string -%}
            {%- do statuses.update({result.node.unique_id: status}) -%}
            {%- if status != 'skipped' -%}
                {%- do touched.append(result.node.unique_id) -%}
            {%- endif -%}
            {%- set subjects = result.node.depends_on.nodes if result.node.resource_type | string in ('test', 'unit_test')
                else [result.node.unique_id] -%}
            {%- if status not in ('success', 'pass', 'warn', 'no-op') and subjects | select('in', own) | list -%}
                {%- do reasons.append(result.node.name ~ ' ' ~ status) -%}
            {%- endif -%}
        {%- endfor -%}
        {%- if invocation_args_dict.get('empty') -%}
            {%- do reasons.append('--empty builds no rows') -%}
        {%- endif -%}
        {%- if lakehouse_patterns.is_sample_run() -%}
            {%- do reasons.append('--sample builds a part of the rows') -%}
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
        {%- set built = lakehouse_patterns._readiness_members(dataset, touched) -%}
        {%- if not built and lakehouse_patterns._readiness_members(dataset, selected_resources) -%}
            {%- do run_query(
                'update ' ~ lakehouse_patterns._readiness_ledger(location_root) ~ ' set dataset = '
                ~ lakehouse_patterns.text_literal(dataset) ~ ' where dataset = '
                ~ lakehouse_patterns._readiness_withdrawn(dataset)
            ) -%}
            {%- do log('readiness of ' ~ dataset ~ ' stays as it was: none of its tables was built', info=true) -%}
        {%- elif built and reasons -%}
            {%- do run_query(
                'delete from ' ~ lakehouse_patterns._readiness_ledger(location_root) ~ ' where dataset = '
                ~ lakehouse_patterns._readiness_withdrawn(dataset)
            ) -%}
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


{% macro _readiness_members(dataset, among=none, stored=true) %}
    {#- The dataset's nodes, by default those with a table; with `among` only the nodes with these unique ids. -#}
    {%- set members = [] -%}
    {%- for node in graph.nodes.values()
        if node.resource_type in ('model', 'seed', 'snapshot')
        and dataset in node.config.tags
        and (not stored or node.config.materialized not in ('ephemeral', 'view'))
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
    dataset in ({{ lakehouse_patterns.text_literal(dataset) }}, {{ lakehouse_patterns._readiness_withdrawn(dataset) }})
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
