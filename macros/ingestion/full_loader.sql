{#-
    Full Loader in SQL: each run writes the whole dataset to `<model>_<yyyymmdd>`, checks it there, and only then makes
    the view `<model>` show it, in one statement.

    The view names the commit that it shows (`version as of`), not just the table. So the exposed version can be
    loaded again, and that load refused, without a reader seeing any of it. What VACUUM and the log's clean-up would
    take from under the view stays, because the version tables keep removed files and log for ten years: a version
    is meant to be dropped as a whole.

    Version tables are managed ones, whatever `location_root` says: dropping an external table leaves its files.

    With `immutable` it is Proxy: a version is named after the run's start, written once and never dropped.
-#}

{% materialization versioned_table, adapter='spark', supported_languages=['sql'] %}
    {%- set options = lakehouse_patterns._full_loader_options(lakehouse_patterns.options('full_loader') or {}) -%}
    {%- set version = lakehouse_patterns._full_loader_version(options) -%}
    {%- set existing_relation = load_relation(this) -%}
    {%- do lakehouse_patterns.require(
        existing_relation is none or existing_relation.is_view,
        this ~ ' is a table: rename or drop it, a versioned_table is a view over its versions'
    ) -%}
    {{ run_hooks(pre_hooks) }}

    {%- set table = lakehouse_patterns._full_loader_table(this, version) -%}
    {%- call statement('main') -%}
        create{{ '' if options.immutable else ' or replace' }} table {{ table }}
        using delta
        tblproperties (
            {%- if options.immutable %}
            'delta.appendOnly' = 'true',
            {%- endif %}
            'delta.deletedFileRetentionDuration' = 'interval 3650 days',
            'delta.logRetentionDuration' = 'interval 3650 days',
            'lakehouse_patterns.full_loader.version' = '{{ version }}'
        )
        as
        {{ compiled_code }}
    {%- endcall -%}

    {%- set shown = lakehouse_patterns._full_loader_version_of(existing_relation) if existing_relation else '' -%}
    {%- if shown > version -%}
        {%- do log(table ~ ' was loaded; ' ~ this ~ ' keeps showing the newer version ' ~ shown, info=true) -%}
    {%- else -%}
        {%- do lakehouse_patterns._full_loader_expose(options, this, version, existing_relation is not none) -%}
    {%- endif -%}
    {%- if not options.immutable -%}
        {%- do lakehouse_patterns._full_loader_drop_old(options, this, [version, shown] | max) -%}
    {%- endif -%}

    {%- do apply_grants(this, config.get('grants'), should_revoke(existing_relation, false)) -%}
    {{ run_hooks(post_hooks) }}
    {{ return({'relations': [this.incorporate(type='view')]}) }}
{% endmaterialization %}


{% macro expose_version(model_name, version=none, max_shrink_percent=none) %}
    {{ return(adapter.dispatch('expose_version', 'lakehouse_patterns')(model_name, version, max_shrink_percent)) }}
{% endmacro %}

{% macro default__expose_version(model_name, version, max_shrink_percent) %}
    {%- if execute -%}
        {%- set nodes = graph.nodes.values()
            | selectattr('resource_type', 'equalto', 'model') | selectattr('name', 'equalto', model_name) | list -%}
        {%- do lakehouse_patterns.require(
            nodes and nodes[0].config.materialized == 'versioned_table',
            "expose_version needs the name of a model with materialized='versioned_table', got '" ~ model_name ~ "'"
        ) -%}
        {%- set given = ((nodes[0].config.get('meta') or {}).get('lakehouse_patterns') or {}).get('full_loader') or {} -%}
        {%- set options = lakehouse_patterns._full_loader_options(given) -%}
        {%- if max_shrink_percent is not none -%}
            {%- do options.update({'max_shrink_percent': max_shrink_percent}) -%}
        {%- endif -%}
        {%- set view = api.Relation.create(schema=nodes[0].schema, identifier=nodes[0].alias, type='view') -%}
        {%- set versions = lakehouse_patterns._full_loader_versions(view) -%}
        {#- By default the newest that is there, not this run's: exposing may be retried alone. -#}
        {%- set version = versions | last | default('newest') if version is none
            else lakehouse_patterns._full_loader_run(version) if options.immutable
            else lakehouse_patterns._full_loader_date(version) | replace('-', '') -%}
        {%- do lakehouse_patterns.require(
            version in versions,
            'version ' ~ version ~ ' of ' ~ view ~ ' is not there; kept are ' ~ (versions | join(', ') or 'none')
        ) -%}
        {%- set is_shown = adapter.get_relation(none, view.schema, view.identifier) is not none -%}
        {%- do lakehouse_patterns._full_loader_expose(options, view, version, is_shown) -%}
    {%- endif -%}
{% endmacro %}


{% macro logical_date() %}
    {{ return(adapter.dispatch('logical_date', 'lakehouse_patterns')()) }}
{% endmacro %}

{% macro default__logical_date() %}
    {#- Of the run, never of the clock: a backfill says which day it is for. -#}
    {%- set text = var('logical_date', none) or env_var('LOGICAL_DATE', '') -%}
    {{ return(lakehouse_patterns._full_loader_date(text) if execute else text) }}
{% endmacro %}


{% macro _full_loader_version(options) %}
    {#- Proxy names a version after the run's start: a rerun for the same date writes another one. -#}
    {%- if options.immutable -%}
        {{ return(run_started_at.strftime('%Y%m%d_%H%M%S')) }}
    {%- endif -%}
    {{ return(lakehouse_patterns.logical_date() | replace('-', '')) }}
{% endmacro %}


{% macro _full_loader_date(text) %}
    {%- do lakehouse_patterns.require(
        modules.re.fullmatch('\\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\\d|3[01])', text | string),
        "the logical date must be a day such as 2024-01-01, as --vars '{logical_date: …}' or in LOGICAL_DATE, got '"
        ~ text ~ "'"
    ) -%}
    {{ return(text | string) }}
{% endmacro %}


{% macro _full_loader_run(text) %}
    {#- YAML reads 20240101_101500 without quotes as a number. -#}
    {%- set text = text | string | replace('_', '') -%}
    {%- do lakehouse_patterns.require(
        modules.re.fullmatch('\\d{14}', text),
        "an immutable version is a run's start such as 20240101_101500, got '" ~ text ~ "'"
    ) -%}
    {{ return(text[:8] ~ '_' ~ text[8:]) }}
{% endmacro %}


{% macro _full_loader_options(given) %}
    {%- do lakehouse_patterns.require_known_keys(
        'full_loader', given, ['key', 'not_null', 'min_rows', 'max_shrink_percent', 'keep_versions', 'immutable']
    ) -%}
    {%- set options = {
        'key': lakehouse_patterns.as_list(given.get('key')),
        'not_null': lakehouse_patterns.as_list(given.get('not_null')),
        'min_rows': given.get('min_rows', 1),
        'max_shrink_percent': given.get('max_shrink_percent', 50),
        'keep_versions': given.get('keep_versions', 7),
        'immutable': given.get('immutable', false),
    } -%}
    {%- do lakehouse_patterns.require(
        options.immutable is boolean, 'immutable must be true or false, got ' ~ options.immutable
    ) -%}
    {%- do lakehouse_patterns.require(
        not (options.immutable and 'keep_versions' in given),
        'immutable versions are never dropped: leave keep_versions out'
    ) -%}
    {%- do lakehouse_patterns.require(
        options.keep_versions is number and options.keep_versions >= 2,
        'keep_versions must be at least 2, the exposed one and a way back, got ' ~ options.keep_versions
    ) -%}
    {%- do lakehouse_patterns.require(
        options.max_shrink_percent is number and 0 <= options.max_shrink_percent <= 100,
        'max_shrink_percent must be between 0 and 100, got ' ~ options.max_shrink_percent
    ) -%}
    {%- do lakehouse_patterns.require(
        options.min_rows is number and options.min_rows >= 0,
        'min_rows must be 0 or more, got ' ~ options.min_rows
    ) -%}
    {{ return(options) }}
{% endmacro %}


{% macro _full_loader_table(view, version) %}
    {{ return(view.incorporate(path={'identifier': view.identifier ~ '_' ~ version}, type='table')) }}
{% endmacro %}


{% macro _full_loader_version_of(relation) %}
    {#- Spark answers an absent property with a sentence in place of its value. -#}
    {%- set value = run_query(
        'show tblproperties ' ~ relation ~ " ('lakehouse_patterns.full_loader.version')"
    ).rows[0][1] -%}
    {{ return(value if modules.re.fullmatch('\\d{8}(_\\d{6})?', value) else '') }}
{% endmacro %}


{% macro _full_loader_versions(view) %}
    {%- set versions = [] -%}
    {%- for row in run_query("show tables in " ~ view.schema ~ " like '" ~ view.identifier ~ "_*'").rows -%}
        {%- set version = row[1][view.identifier | length + 1:] -%}
        {%- if modules.re.fullmatch('\\d{8}(_\\d{6})?', version) -%}
            {%- do versions.append(version) -%}
        {%- endif -%}
    {%- endfor -%}
    {{ return(versions | sort) }}
{% endmacro %}


{% macro _full_loader_expose(options, view, version, is_shown) %}
    {%- set table = lakehouse_patterns._full_loader_table(view, version) -%}
    {%- set commit = run_query('describe history ' ~ table ~ ' limit 1').rows[0]['version'] -%}
    {%- set snapshot = table ~ ' version as of ' ~ commit -%}
    {%- set found = run_query(lakehouse_patterns._full_loader_findings_sql(options, snapshot)).rows[0] -%}
    {%- set shown_rows = run_query('select count(*) from ' ~ view).rows[0][0] if is_shown else 0 -%}
    {%- set problems = [] -%}
    {%- for name in lakehouse_patterns._full_loader_not_null(options) -%}
        {%- if found['null_' ~ loop.index0] -%}
            {%- do problems.append(found['null_' ~ loop.index0] ~ ' rows with NULL in ' ~ name) -%}
        {%- endif -%}
    {%- endfor -%}
    {%- if found['repeated_keys'] -%}
        {%- do problems.append(found['repeated_keys'] ~ ' keys more than once') -%}
    {%- endif -%}
    {%- if found['row_count'] < options.min_rows -%}
        {%- do problems.append(
            found['row_count'] ~ ' rows, allowed are ' ~ options.min_rows ~ ' or more (min_rows)'
        ) -%}
    {%- endif -%}
    {%- if found['row_count'] < shown_rows * (1 - options.max_shrink_percent / 100) -%}
        {%- do problems.append(
            found['row_count'] ~ ' rows, exposed are ' ~ shown_rows ~ ' and allowed is a drop of '
            ~ options.max_shrink_percent ~ ' % (max_shrink_percent)'
        ) -%}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        not problems, 'version ' ~ version ~ ' has ' ~ (problems | join(' and ')) ~ '; ' ~ view ~ ' stays as it is'
    ) -%}
    {%- do run_query(lakehouse_patterns._full_loader_view_sql(view, version, snapshot)) -%}
    {%- do log(view ~ ' shows version ' ~ version ~ ' (' ~ found['row_count'] ~ ' rows)', info=true) -%}
{% endmacro %}


{% macro _full_loader_not_null(options) %}
    {{ return((options.key + options.not_null) | unique | list) }}
{% endmacro %}


{% macro _full_loader_findings_sql(options, snapshot) %}
    {%- set columns = lakehouse_patterns._full_loader_not_null(options) -%}
select
    coalesce(sum(copies), 0) as row_count,
    {%- for name in columns %}
    coalesce(sum(null_{{ loop.index0 }}), 0) as null_{{ loop.index0 }},
    {%- endfor %}
    {{ 'count_if(copies > 1)' if options.key else '0' }} as repeated_keys
from (
    select
        {%- for name in columns %}
        count_if({{ adapter.quote(name) }} is null) as null_{{ loop.index0 }},
        {%- endfor %}
        count(*) as copies
    from {{ snapshot }}
    {%- if options.key %}
    group by {% for name in options.key %}{{ adapter.quote(name) }}{{ ', ' if not loop.last }}{% endfor %}
    {%- endif %}
)
{%- endmacro %}


{% macro _full_loader_view_sql(view, version, snapshot) %}
create or replace view {{ view }}
tblproperties ('lakehouse_patterns.full_loader.version' = '{{ version }}')
as
select *
from {{ snapshot }}
{%- endmacro %}


{% macro _full_loader_drop_old(options, view, shown) %}
    {%- for version in lakehouse_patterns._full_loader_versions(view)[:-options.keep_versions] if version != shown -%}
        {%- set table = lakehouse_patterns._full_loader_table(view, version) -%}
        {%- if lakehouse_patterns._full_loader_version_of(table) == version -%}
            {%- do run_query('drop table ' ~ table) -%}
        {%- endif -%}
    {%- endfor -%}
{% endmacro %}
