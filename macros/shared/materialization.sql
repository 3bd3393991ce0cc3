{#-
    The steps that the package's materializations share. Each of them runs in this order:

    context = start_materialization(name)             what is asked of the model and of its table before any statement
    run_hooks(pre_hooks)
    stage_batch(context, compiled_code)              the model's SQL as a temporary view, its contract, its columns
    … the materialization's own statements; with `context.is_empty` none that changes what is published …
    finish_materialization(context)                  grants and comments
    run_hooks(post_hooks)

    A context is {relation, existing, exposes, options, batch, types: {column: type} of the batch, is_empty}.
-#}

{% macro start_materialization(materialization, exposes='table', replaces_others=false) %}
    {#-
        `exposes`: whether readers get a Delta table, or a view over tables that belong to the materialization.
        `replaces_others`: whether a view or a table of another format of that name is dropped for the model's table.
    -#}
    {%- do lakehouse_patterns.require_proved_adapter("materialized='" ~ materialization ~ "'") -%}
    {%- do lakehouse_patterns.require_no_sample("materialized='" ~ materialization ~ "'") -%}
    {%- set existing = load_relation(this) -%}
    {%- do lakehouse_patterns.require_supported_configs(materialization) -%}
    {#- The tables behind a view are Delta tables without being told so. -#}
    {%- do lakehouse_patterns.require(
        (config.get('file_format') or ('delta' if exposes == 'view' else none)) == 'delta',
        "materialized='" ~ materialization ~ "' needs file_format='delta', got '" ~ config.get('file_format') ~ "'"
    ) -%}
    {%- if exposes == 'table' -%}
        {%- do lakehouse_patterns.require(
            existing is none or existing.is_delta or replaces_others,
            this ~ ' is there and no Delta table: rename or drop it'
        ) -%}
    {%- else -%}
        {%- do lakehouse_patterns.require(
            existing is none or existing.is_view,
            this ~ ' is a table: rename or drop it, ' ~ materialization ~ ' makes a view of that name'
        ) -%}
    {%- endif -%}
    {%- do lakehouse_patterns.schema_change_mode(exposes) -%}
    {{ return({
        'relation': this,
        'existing': existing,
        'exposes': exposes,
        'options': lakehouse_patterns.options(materialization) or {},
        'batch': lakehouse_patterns.batch_view(this),
        'types': {},
        'is_empty': lakehouse_patterns.is_empty_run(),
    }) }}
{% endmacro %}


{% macro drop_other_relation(existing) %}
    {#- A view, or a table of another format, makes room for the Delta table of a materialization that replaces it. -#}
    {%- if existing is not none and not (existing.is_table and existing.is_delta) -%}
        {%- do adapter.drop_relation(existing) -%}
    {%- endif -%}
{% endmacro %}


{% macro is_empty_run() %}
    {#- `--empty` reads no row of any input. It checks that the SQL runs, and may never take rows from readers. -#}
    {{ return((flags.EMPTY | default(false)) is true) }}
{% endmacro %}


{% macro is_sample_run() %}
    {#- `--sample` reads the rows of a time window of each input that has an `event_time`. dbt's `flags` lack it. -#}
    {{ return((invocation_args_dict.get('sample') or none) is not none) }}
{% endmacro %}


{% macro require_no_sample(what) %}
    {#- A part taken for the whole would replace, close or skip published rows. -#}
    {%- do lakehouse_patterns.require(
        not lakehouse_patterns.is_sample_run(),
        '--sample reads a part of each input, which ' ~ what ~ ' would publish as the whole in ' ~ this
        ~ ': leave out --sample, or check the SQL with --empty'
    ) -%}
{% endmacro %}


{% macro require_no_emptying(relation, existing) %}
    {#- For what replaces a whole table: dbt's incremental models with --full-refresh. -#}
    {%- do lakehouse_patterns.require(
        existing is none or not lakehouse_patterns.is_empty_run(),
        '--empty would replace the rows of ' ~ relation ~ ' by none: leave out --empty or --full-refresh'
    ) -%}
{% endmacro %}


{% macro stage_batch(context, compiled_code, checks_contract=true) %}
    {#- `checks_contract`: whether the table, of which a contract speaks, has the model's columns. -#}
    {%- call statement('create_batch_view') -%}
        {{ create_temporary_view(context.batch, compiled_code) }}
    {%- endcall -%}
    {%- if checks_contract -%}
        {%- do lakehouse_patterns.require_contract(context.batch) -%}
    {%- endif -%}
    {%- do context.types.update(lakehouse_patterns.column_types(context.batch)) -%}
    {%- do lakehouse_patterns.require_storable(context.types) -%}
    {%- set partitions = lakehouse_patterns.spelled_names(
        context.types, lakehouse_patterns.as_list(config.get('partition_by'))
    ) -%}
    {%- set stored = [] -%}
    {%- for name, type in context.types.items() -%}
        {%- do stored.append(lakehouse_patterns._as_stored(name, type, partitions)) -%}
    {%- endfor -%}
    {%- if stored != lakehouse_patterns.quoted_names(context.types) -%}
        {%- call statement('create_batch_view_as_stored') -%}
            {{ create_temporary_view(
                context.batch, 'select ' ~ (stored | join(', ')) ~ ' from (\n' ~ compiled_code ~ '\n)'
            ) }}
        {%- endcall -%}
    {%- endif -%}
{% endmacro %}


{% macro require_contract(batch) %}
    {#- Names and types of an enforced contract, at every run; dbt-spark asks when it creates a table, and never again. -#}
    {%- if (config.get('contract') or {}).enforced -%}
        {%- do get_assert_columns_equivalent('select * from ' ~ batch) -%}
    {%- endif -%}
{% endmacro %}


{% macro finish_materialization(context, replaced=false) %}
    {#- `replaced`: whether the whole table is a new one, without the grants of the one before. -#}
    {%- do apply_grants(context.relation, config.get('grants'), should_revoke(context.existing, replaced)) -%}
    {%- if context.exposes == 'table' -%}
        {%- do lakehouse_patterns.persist_comments(context.relation) -%}
    {%- endif -%}
{% endmacro %}


{% macro publish_nothing(context) %}
    {#- The `main` statement of a run with --empty whose relation is there. -#}
    {%- call noop_statement('main', 'EMPTY') -%}{%- endcall -%}
    {%- do log('--empty: ' ~ context.relation ~ ' stays as it is', info=true) -%}
{% endmacro %}


{% macro refuse_full_refresh(materialization) %}
    {%- do lakehouse_patterns.require(
        not should_full_refresh(),
        "materialized='" ~ materialization ~ "' knows the rows of one slice, a full refresh would lose all the others: "
        ~ 'drop the table and run each slice'
    ) -%}
{% endmacro %}
