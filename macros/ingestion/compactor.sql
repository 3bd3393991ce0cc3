{#-
    Compactor in SQL: OPTIMIZE and VACUUM for the tables that a project builds.

    The policy of a table is under `meta.lakehouse_patterns.compactor` of its model:

    - `mode: daily`: `dbt run-operation compactor`, run on a schedule, compacts and vacuums every such table;
    - `mode: inline`: the post-hook `lakehouse_patterns.compactor_inline()` compacts after the model's own write, and
      never vacuums. On a model of mode daily the same hook does nothing, so that a project can set it for all models.

    A table is compacted when `describe detail` shows at least `min_files` files, smaller than `small_file_mb` on
    average. python_jobs/ingestion/compactor.py checks each partition instead, and reports times.
-#}

{% macro compactor(tables=none, vacuum=true, retention_hours=none, allow_unsafe_retention=false) %}
    {{ return(adapter.dispatch('compactor', 'lakehouse_patterns')(
        tables, vacuum, retention_hours, allow_unsafe_retention
    )) }}
{% endmacro %}

{% macro default__compactor(tables, vacuum, retention_hours, allow_unsafe_retention) %}
    {%- set policies = lakehouse_patterns._compactor_policies() -%}
    {%- for name in lakehouse_patterns.as_list(tables) -%}
        {%- do lakehouse_patterns.require(
            name in policies,
            "no model '" ~ name ~ "' has mode daily under meta.lakehouse_patterns.compactor; models with mode daily: "
            ~ (policies | join(', ') or 'none')
        ) -%}
    {%- endfor -%}
    {#- All statements are built first, so that a refused retention changes no table. -#}
    {%- set vacuums = {} -%}
    {%- for name, policy in policies.items() if tables is none or name in lakehouse_patterns.as_list(tables) -%}
        {%- do vacuums.update({
            name: lakehouse_patterns.compactor_vacuum(policy.relation, retention_hours, allow_unsafe_retention)
        }) -%}
        {%- if vacuum and retention_hours is not none -%}
            {%- do lakehouse_patterns.require_no_retention(policy.relation, 'retention_hours 0') -%}
        {%- endif -%}
    {%- endfor -%}
    {%- for name, statement in vacuums.items() -%}
        {%- set policy = policies[name] -%}
        {%- set optimize = lakehouse_patterns._compactor_if_worth_it(policy.relation, policy.options) -%}
        {%- if optimize -%}
            {%- do run_query(optimize) -%}
        {%- endif -%}
        {%- if vacuum -%}
            {%- do run_query(statement) -%}
        {%- endif -%}
        {%- do log(name ~ ': ' ~ (optimize or 'not worth it') ~ ('; ' ~ statement if vacuum else ''), info=true) -%}
    {%- endfor -%}
{% endmacro %}

{% macro compactor_inline() %}
    {{ return(adapter.dispatch('compactor_inline', 'lakehouse_patterns')()) }}
{% endmacro %}

{% macro default__compactor_inline() %}
    {%- set options = lakehouse_patterns.options('compactor') if execute else none -%}
    {%- if options is none -%}
        {{ return('') }}
    {%- endif -%}
    {%- do lakehouse_patterns._compactor_require_options(model.name, options) -%}
    {%- if options.mode == 'daily' -%}
        {{ return('') }}
    {%- endif -%}
    {{ return(lakehouse_patterns._compactor_if_worth_it(this, options)) }}
{% endmacro %}

{% macro compactor_optimize(relation, where=none) %}
    {{ return(adapter.dispatch('compactor_optimize', 'lakehouse_patterns')(relation, where)) }}
{% endmacro %}

{% macro default__compactor_optimize(relation, where) %}
    {{ return('optimize ' ~ relation ~ (' where ' ~ where if where else '')) }}
{% endmacro %}

{% macro compactor_vacuum(relation, retention_hours=none, allow_unsafe_retention=false) %}
    {{ return(adapter.dispatch('compactor_vacuum', 'lakehouse_patterns')(
        relation, retention_hours, allow_unsafe_retention
    )) }}
{% endmacro %}

{% macro default__compactor_vacuum(relation, retention_hours, allow_unsafe_retention) %}
    {#- Delta uses the table's delta.deletedFileRetentionDuration, and of all RETAIN clauses only RETAIN 0 HOURS. -#}
    {%- if retention_hours is none -%}
        {{ return('vacuum ' ~ relation) }}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        retention_hours is number and retention_hours == 0,
        "retention_hours must be 0, got '" ~ retention_hours ~ "', which Delta ignores: set the table's "
        ~ 'delta.deletedFileRetentionDuration'
    ) -%}
    {%- do lakehouse_patterns.require(
        allow_unsafe_retention,
        'retention_hours is 0: slow readers, streams and open writes would lose files; if the table has none, pass '
        ~ 'allow_unsafe_retention: true'
    ) -%}
    {{ return('vacuum ' ~ relation ~ ' retain 0 hours') }}
{% endmacro %}

{% macro _compactor_policies() %}
    {#- A mapping from the name to the relation and the options, for each model of mode daily. -#}
    {%- set policies = {} -%}
    {%- for node in graph.nodes.values() if node.resource_type in ('model', 'snapshot') -%}
        {%- set options = lakehouse_patterns.options_of(node, 'compactor') -%}
        {%- if options is not none -%}
            {%- do lakehouse_patterns._compactor_require_options(node.name, options) -%}
            {%- if options.mode == 'daily' -%}
                {%- do policies.update({node.name: {
                    'options': options,
                    'relation': lakehouse_patterns.relation_of(node)
                }}) -%}
            {%- endif -%}
        {%- endif -%}
    {%- endfor -%}
    {{ return(policies) }}
{% endmacro %}

{% macro _compactor_require_options(name, options) %}
    {%- do lakehouse_patterns.require_pattern_options(
        'compactor', options, what='meta.lakehouse_patterns.compactor of ' ~ name
    ) -%}
    {%- do lakehouse_patterns.require_one_of('mode', options.mode, ['daily', 'inline']) -%}
    {%- for option in ['min_files', 'small_file_mb'] if option in options -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns._is_finite(options[option]) and options[option] > 0,
            option ~ ' of ' ~ name ~ " must be a number above 0, got '" ~ options[option] ~ "'"
        ) -%}
    {%- endfor -%}
{% endmacro %}

{% macro _compactor_if_worth_it(relation, options) %}
    {#- The OPTIMIZE statement, or an empty text below the thresholds. -#}
    {%- set detail = lakehouse_patterns.table_detail(relation) -%}
    {%- set small_bytes = options.get('small_file_mb', 32) * 1024 * 1024 -%}
    {%- if detail['numFiles'] >= options.get('min_files', 4)
        and detail['sizeInBytes'] < detail['numFiles'] * small_bytes -%}
        {{ return(lakehouse_patterns.compactor_optimize(relation, options.where)) }}
    {%- endif -%}
    {{ return('') }}
{% endmacro %}
