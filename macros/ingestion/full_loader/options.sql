{#- Full Loader: names of versions and a model's options. -#}

{% macro _full_loader_version(options) %}
    {#- Proxy names a version after the run's start, so that a rerun for the same date writes another version. -#}
    {%- if options.immutable -%}
        {{ return(run_started_at.strftime('%Y%m%d_%H%M%S')) }}
    {%- endif -%}
    {{ return(lakehouse_patterns.logical_date() | replace('-', '')) }}
{% endmacro %}


{% macro _full_loader_run(text) %}
    {#- YAML reads 20240101_101500 without quotes as a number. -#}
    {%- set text = text | string | replace('_', '') -%}
    {%- do lakehouse_patterns.require(
        modules.re.fullmatch('\\d{14}', text),
        "the version of an immutable model must be a run's start such as 20240101_101500, got '" ~ text ~ "'"
    ) -%}
    {{ return(text[:8] ~ '_' ~ text[8:]) }}
{% endmacro %}


{% macro _full_loader_options(given) %}
    {%- do lakehouse_patterns.require_pattern_options('full_loader', given) -%}
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
        options.keep_versions is integer and options.keep_versions >= 2,
        'keep_versions must be at least 2, the exposed one and a way back, got ' ~ options.keep_versions
    ) -%}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._is_finite(options.max_shrink_percent) and 0 <= options.max_shrink_percent <= 100,
        'max_shrink_percent must be between 0 and 100, got ' ~ options.max_shrink_percent
    ) -%}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns._is_finite(options.min_rows) and options.min_rows >= 0,
        'min_rows must be 0 or more, got ' ~ options.min_rows
    ) -%}
    {{ return(options) }}
{% endmacro %}


{% macro _full_loader_table(view, version) %}
    {{ return(lakehouse_patterns.relation_beside(view, '_' ~ version)) }}
{% endmacro %}


{% macro _full_loader_version_of(relation) %}
    {#- The version that a table holds or a view shows; an empty text for a relation without our property. -#}
    {{ return(lakehouse_patterns.table_property(relation, 'lakehouse_patterns.full_loader.version') or '') }}
{% endmacro %}


{% macro _full_loader_versions(view) %}
    {#- Only versions that this materialization created: another table may have the name of a version. -#}
    {%- set versions = [] -%}
    {%- for version, table in lakehouse_patterns.names_like(view).items()
        if modules.re.fullmatch('\\d{8}(_\\d{6})?', version)
        and lakehouse_patterns._full_loader_version_of(table) == version -%}
        {%- do versions.append(version) -%}
    {%- endfor -%}
    {{ return(versions | sort) }}
{% endmacro %}
