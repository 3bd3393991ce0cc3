{#- Full Loader: the checks of a version, the view that shows it, and the rollback. -#}

{% macro expose_version(model_name, version=none, max_shrink_percent=none) %}
    {{ return(adapter.dispatch('expose_version', 'lakehouse_patterns')(model_name, version, max_shrink_percent)) }}
{% endmacro %}

{% macro default__expose_version(model_name, version, max_shrink_percent) %}
    {%- if execute -%}
        {%- set node = lakehouse_patterns.model_of(
            model_name, 'versioned_table', 'expose_version needs the name of'
        ) -%}
        {#- An argument is checked as the model's option is. -#}
        {%- set options = lakehouse_patterns._full_loader_options(dict(
            lakehouse_patterns.options_of(node, 'full_loader') or {},
            **({} if max_shrink_percent is none else {'max_shrink_percent': max_shrink_percent})
        )) -%}
        {%- set view = lakehouse_patterns.relation_of(node, 'view') -%}
        {%- set versions = lakehouse_patterns._full_loader_versions(view) -%}
        {#- The default is the newest kept version, not this run's version, because the operation may run alone. -#}
        {%- set version = versions | last | default('newest') if version is none
            else lakehouse_patterns._full_loader_run(version) if options.immutable
            else lakehouse_patterns.require_date(version) | replace('-', '') -%}
        {%- do lakehouse_patterns.require(
            version in versions,
            'version ' ~ version ~ ' of ' ~ view ~ ' is not there; kept are ' ~ (versions | join(', ') or 'none')
        ) -%}
        {%- do lakehouse_patterns._full_loader_expose(
            options, view, version, lakehouse_patterns.existing_of(node) is not none, node
        ) -%}
    {%- endif -%}
{% endmacro %}


{% macro _full_loader_expose(options, view, version, is_shown, node) %}
    {%- set table = lakehouse_patterns._full_loader_table(view, version) -%}
    {%- set commit = lakehouse_patterns.latest_version(table) -%}
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
    {%- set comments = lakehouse_patterns.view_comments(node, lakehouse_patterns.column_types(table)) -%}
    {%- do run_query(lakehouse_patterns._full_loader_view_sql(view, version, snapshot, comments)) -%}
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
        count_if({{ lakehouse_patterns.quoted_name(name) }} is null) as null_{{ loop.index0 }},
        {%- endfor %}
        count(*) as copies
    from {{ snapshot }}
    {%- if options.key %}
    group by {{ lakehouse_patterns.quoted_names(options.key) | join(', ') }}
    {%- endif %}
)
{%- endmacro %}


{% macro _full_loader_view_sql(view, version, snapshot, comments='') %}
create or replace view {{ view }}
{{ comments }}
tblproperties ('lakehouse_patterns.full_loader.version' = '{{ version }}')
as
select *
from {{ snapshot }}
{%- endmacro %}


{% macro _full_loader_empty_view_sql(view, types) %}
    {#- For --empty when no view exists yet, so that models that read the view can be checked too. -#}
create or replace view {{ view }}
{{ lakehouse_patterns.view_comments(model, types) }}
as
{{ lakehouse_patterns.no_rows_sql(types) }}
{%- endmacro %}


{% macro _full_loader_drop_old(options, view, shown) %}
    {%- for version in lakehouse_patterns._full_loader_versions(view)[:-options.keep_versions] if version != shown -%}
        {%- do run_query('drop table ' ~ lakehouse_patterns._full_loader_table(view, version)) -%}
    {%- endfor -%}
{% endmacro %}
