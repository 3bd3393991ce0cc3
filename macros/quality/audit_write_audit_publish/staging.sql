{#- Audit-Write-Audit-Publish: the staging table, and what a run replaces. -#}

{% macro _awap_stage(scope, batch) %}
    {#-
        The batch with, in the run's mark, the dispatching `record` audits that a row fails. They are judged here and
        nowhere else: a condition on `current_timestamp()` would be true at the audit and false when the rows are
        published. Statistics would be collected for a table that is read whole.
    -#}
    {%- set staging = scope.staging -%}
    {%- set root = config.get('location_root') -%}
    {%- do run_query(
        'create schema if not exists ' ~ staging.without_identifier()
        ~ (' location ' ~ lakehouse_patterns.text_literal(root ~ '__staging') if root else '')
    ) -%}
    {%- do lakehouse_patterns._awap_require_free_staging(staging) -%}
    {%- call statement('stage') -%}
        create or replace table {{ staging }}
        {{ lakehouse_patterns._awap_clauses(scope.types, {
            'delta.dataSkippingNumIndexedCols': '0', 'lakehouse_patterns.staged_by': invocation_id
        }) }}
        as
        select
            *,
            array_compact(array(
                cast(null as string)
                {%- for audit in scope.audits if lakehouse_patterns._awap_rejects_rows(audit) %},
                case
                    when {{ scope.is_deleted ~ ' is not true and ' if scope.is_deleted }}({{ audit.valid_when }}) is not true
                        then {{ lakehouse_patterns.text_literal(audit.name) }}
                end
                {%- endfor %}
            )) as {{ lakehouse_patterns._awap_mark() }}
        from {{ batch }}
    {%- endcall -%}
{% endmacro %}


{% macro _awap_require_free_staging(staging) %}
    {#- What a killed run left is replaced; a table or a view that has the name by chance is somebody's. -#}
    {%- do lakehouse_patterns.require(
        not lakehouse_patterns.is_in_catalog(staging)
        or lakehouse_patterns.table_property(staging, 'lakehouse_patterns.staged_by') is not none,
        staging ~ ' exists and was not created by awap: rename or drop it'
    ) -%}
{% endmacro %}


{% macro _awap_mark() %}
    {#-
        A column of the staging table that only this run's has. Two runs of one model at once share the table, and each
        statement that reads it names the column: rows that another run staged can't be taken for those that were
        audited, also when they come between two statements.
    -#}
    {{ return('lakehouse_patterns_staged_by_' ~ (invocation_id | replace('-', '_'))) }}
{% endmacro %}


{% macro _awap_rejects_rows(audit) %}
    {{ return(audit.type == 'record' and audit.outcome == 'dispatch') }}
{% endmacro %}


{% macro _awap_staged_rows(staging, dispatches=false) %}
    {%- set mark = lakehouse_patterns._awap_mark() -%}
    {{ return(
        '(select * except (' ~ mark ~ ')' ~ (', ' ~ mark ~ ' as lakehouse_patterns_rejected_by' if dispatches else '')
        ~ ' from ' ~ staging ~ ')'
    ) }}
{% endmacro %}


{% macro _awap_require_own_staging(staging) %}
    {#- The same in a sentence, before anything is written. -#}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns.table_property(staging, 'lakehouse_patterns.staged_by') == invocation_id,
        'nothing was published from ' ~ staging ~ ': another run of the model staged its rows meanwhile'
    ) -%}
{% endmacro %}


{% macro _awap_clauses(types, own) %}
    {#-
        Staged and rejected rows have the model's columns, whose names may need the mapping that the model's table has, and
        whose types a table that is replaced must allow.
    -#}
    {%- set mapping = 'delta.columnMapping.mode' -%}
    {%- set given = (config.get('tblproperties') or {}).get(mapping) -%}
    {{ return(lakehouse_patterns.table_clauses(
        {'tblproperties': {mapping: given} if given else {}}, dict(own, **lakehouse_patterns.features_of(types))
    )) }}
{% endmacro %}


{% macro _awap_scope(options, context) %}
    {#-
        What this run replaces. `staged` are the staged rows, and `rows` those that are audited and published, in SQL;
        `interval` is the SQL condition of `[from, to)`, if given; `target` is the published table when only some of its
        periods are replaced, else none; `stored` are its columns, and `added` those that it will get.
    -#}
    {%- set existing = context.existing -%}
    {%- set rebuilds = existing is none or should_full_refresh() or not existing.is_delta -%}
    {%- set staging = this.incorporate(path={'schema': this.schema ~ '__staging'}, type='table') -%}
    {%- set staged = lakehouse_patterns._awap_staged_rows(staging, options.dispatches) -%}
    {%- set scope = {
        'staging': staging,
        'staged': staged,
        'rows': staged,
        'types': context.types,
        'existing': existing,
        'target': none if rebuilds or not options.period else existing,
        'run': run_started_at.strftime('%Y-%m-%d'),
        'type': 'date',
        'period': none,
        'interval': none,
        'audits': options.audits + lakehouse_patterns._awap_contract_audits(options.dispatches),
    } -%}
    {%- do lakehouse_patterns._awap_follow_schema(scope, options, rebuilds) -%}
    {%- do lakehouse_patterns._awap_require_own_companions(options) -%}
    {%- for audit in options.audits if audit.type == 'null_share' -%}
        {%- do lakehouse_patterns._awap_field(audit, context.types) -%}
    {%- endfor -%}
    {%- if options.dispatches -%}
        {%- do lakehouse_patterns._awap_require_free_names(context.types) -%}
    {%- endif -%}
    {%- if options.period -%}
        {%- do lakehouse_patterns._awap_set_period(scope, options) -%}
    {%- endif -%}
    {%- if options.is_deleted -%}
        {%- set flag = lakehouse_patterns._awap_column(context.types, 'is_deleted', options.is_deleted) -%}
        {%- do lakehouse_patterns.require_boolean(context.types, 'is_deleted', flag) -%}
        {%- do scope.update({'is_deleted': lakehouse_patterns.quoted_name(flag)}) -%}
        {%- do scope.update({'rows': '(select * from ' ~ staged ~ ' where ' ~ scope.is_deleted ~ ' is not true)'}) -%}
    {%- endif -%}
    {%- do scope.update({'results': lakehouse_patterns._awap_results()}) -%}
    {{ return(scope) }}
{% endmacro %}


{% macro _awap_column(types, option, name) %}
    {%- set known = lakehouse_patterns.column_name(types, name) -%}
    {%- do lakehouse_patterns.require(
        known is not none,
        option ~ " of awap must be a column of the model, got '" ~ name ~ "'; it has: " ~ (types | join(', '))
    ) -%}
    {{ return(known) }}
{% endmacro %}


{% macro _awap_follow_schema(scope, options, rebuilds) %}
    {#-
        Before anything is staged, so that a refusal leaves no companion table behind; columns are added when the rows
        are published. Without a period the whole table is replaced and has the model's columns, whatever they are.
    -#}
    {%- set mode = lakehouse_patterns.schema_change_mode() -%}
    {%- do lakehouse_patterns.require(
        options.period or mode != 'append_new_columns',
        "on_schema_change='append_new_columns' of materialized='awap' needs a period: without one the whole table is "
        ~ "replaced and has the model's columns"
    ) -%}
    {%- if scope.target or (mode == 'fail' and not rebuilds) -%}
        {%- set stored = lakehouse_patterns.column_types(scope.existing) -%}
        {%- set differences = lakehouse_patterns.allowed_differences(this, stored, scope.types, mode) -%}
        {%- do scope.update({'stored': stored, 'added': differences.added}) -%}
    {%- endif -%}
{% endmacro %}


{% macro _awap_set_period(scope, options) %}
    {%- set name = lakehouse_patterns._awap_column(scope.types, 'period', options.period) -%}
    {%- set type = scope.types[name] -%}
    {%- do lakehouse_patterns.require(
        modules.re.fullmatch('tinyint|smallint|int|bigint|decimal.*|date|timestamp.*|string|char.*|varchar.*', type),
        'period of awap must be a column of dates, times, integers, decimals or texts, got ' ~ name ~ ' of type ' ~ type
    ) -%}
    {%- do scope.update({'period': lakehouse_patterns.quoted_name(name), 'type': type}) -%}
    {%- if options.from is not none -%}
        {%- set bounds = run_query(lakehouse_patterns._awap_bounds_sql(options, type)).rows[0] -%}
        {%- do lakehouse_patterns.require(
            bounds['is_before'],
            'from must lie before to and both must be of type ' ~ type ~ ', got ' ~ options.from ~ ' and ' ~ options.to
        ) -%}
        {%- do scope.update({
            'run': bounds['lower_bound'],
            'interval': scope.period ~ ' >= ' ~ lakehouse_patterns.typed_literal(bounds['lower_bound'], type)
            ~ ' and ' ~ scope.period ~ ' < ' ~ lakehouse_patterns.typed_literal(bounds['upper_bound'], type),
        }) -%}
    {%- endif -%}
{% endmacro %}


{% macro _awap_bounds_sql(options, type) %}
    {#- Bounds are compared as their type: as texts, 9 is after 10. -#}
select
    try_cast(lower_value as string) as lower_bound,
    try_cast(upper_value as string) as upper_bound,
    coalesce(lower_value < upper_value, false) as is_before
from (
    select
        try_cast({{ options.from }} as {{ type }}) as lower_value,
        try_cast({{ options.to }} as {{ type }}) as upper_value
)
{%- endmacro %}
