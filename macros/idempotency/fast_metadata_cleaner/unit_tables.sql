{#-
    Fast Metadata Cleaner: one dataset in many tables, each of one unit of time, behind one view.

    `materialized='unit_tables'` loads the run's day into the table of its unit, `<model>_2024_46`. On the first day of
    a unit the table is cleaned first, by an operation that reads no data file; the other days only append. So a whole
    unit is loaded again by running its days in order from the first, and nothing less than a unit can be.

    An append repeats what it appended before. So each row keeps the day of its load, `unit_day`, and a day that the
    unit holds already is refused, by a look at the file statistics. Two runs of one day at once: the second commit
    fails, or Delta skips it by its transaction number and the run finds that out.

    Tables without our properties are never changed, even if they are named like a unit's table.
    The tables are managed ones, whatever `location_root` says: dropping an external table leaves its files.
-#}

{% materialization unit_tables, adapter='spark', supported_languages=['sql'] %}
    {%- set context = lakehouse_patterns.start_materialization('unit_tables', exposes='view') -%}
    {%- set options = lakehouse_patterns._units_options(context.options) -%}
    {%- do lakehouse_patterns.refuse_full_refresh('unit_tables') -%}
    {%- set date = lakehouse_patterns.logical_date() -%}
    {{ run_hooks(pre_hooks) }}

    {%- do lakehouse_patterns.stage_batch(context, compiled_code) -%}
    {%- do lakehouse_patterns.require_free_names(context.types, ['unit_day'], "materialized='unit_tables'") -%}
    {%- if context.is_empty -%}
        {%- if context.existing is none -%}
            {%- do run_query(lakehouse_patterns._units_view_sql(
                this, {'columns': context.types, 'tables': []}, model
            )) -%}
        {%- endif -%}
        {%- do lakehouse_patterns.publish_nothing(context) -%}
    {%- else -%}
        {%- set target = lakehouse_patterns._units_prepare(this, options, date, context.batch, model) -%}
        {%- call statement('main') -%}
            {{ lakehouse_patterns._units_load_sql(target, date, context.batch, invocation_id) }}
        {%- endcall -%}
        {%- do lakehouse_patterns._units_require_commit(target, invocation_id) -%}
        {%- if lakehouse_patterns.view_comments_differ(model, this) -%}
            {%- do lakehouse_patterns._units_expose(this, lakehouse_patterns._units_tables(this), model) -%}
        {%- endif -%}
    {%- endif -%}

    {%- do lakehouse_patterns.finish_materialization(context) -%}
    {{ run_hooks(post_hooks) }}
    {{ return({'relations': [this.incorporate(type='view')]}) }}
{% endmaterialization %}


{% macro _units_prepare(view, options, date, batch, node=none) %}
    {#-
        The exclusive choice: a unit's first day initialises its table, any other day goes straight to the load. Returns
        the table that the day belongs to, and its version.
    -#}
    {%- do lakehouse_patterns._units_require_past(date) -%}
    {%- set unit = lakehouse_patterns.unit_name(date, options.unit) -%}
    {%- set tables = lakehouse_patterns._units_tables(view) -%}
    {%- set relation = lakehouse_patterns._units_table(view, unit) -%}
    {%- do lakehouse_patterns._units_require_not_frozen(tables, unit) -%}
    {%- set starts = lakehouse_patterns.starts_unit(date, options.unit) -%}
    {%- if starts or not tables -%}
        {%- do lakehouse_patterns._units_initialise(view, options, tables, unit, batch, node) -%}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        starts or not tables or unit in tables,
        'unit ' ~ unit ~ ' of ' ~ view ~ ' is not there: load it from its first day on, or make it with create_unit'
    ) -%}
    {%- set version = lakehouse_patterns.latest_version(relation) -%}
    {%- if not starts -%}
        {%- do lakehouse_patterns._units_require_new_day(relation, date) -%}
        {%- do lakehouse_patterns._units_require_columns(relation, batch) -%}
    {%- endif -%}
    {{ return({'relation': relation, 'version': version}) }}
{% endmacro %}


{% macro _units_initialise(view, options, tables, unit, batch, node=none) %}
    {%- set relation = lakehouse_patterns._units_table(view, unit) -%}
    {%- if unit in tables and options.clean == 'truncate' -%}
        {%- do lakehouse_patterns._units_require_columns(relation, batch) -%}
        {%- do run_query(lakehouse_patterns._units_clean_sql(relation)) -%}
    {%- else -%}
        {%- if unit in tables -%}
            {%- do lakehouse_patterns._units_drop(view, tables, [unit], node) -%}
        {%- endif -%}
        {%- do lakehouse_patterns._units_create(
            view,
            unit,
            'as select *, cast(null as date) as unit_day from ' ~ batch ~ ' where false',
            configuration=(node or {}).config or {}
        ) -%}
        {%- do lakehouse_patterns._units_expose(view, lakehouse_patterns._units_tables(view), node) -%}
    {%- endif -%}
{% endmacro %}


{% macro _units_require_columns(relation, batch) %}
    {%- set stored = lakehouse_patterns.column_types(relation) -%}
    {%- do stored.pop('unit_day', none) -%}
    {%- do lakehouse_patterns.require_no_differences(relation, lakehouse_patterns.schema_differences(
        stored, lakehouse_patterns.column_types(batch)
    ).all) -%}
{% endmacro %}


{% macro _units_require_new_day(relation, date) %}
    {%- set found = run_query(
        'select 1 from ' ~ relation ~ " where unit_day = date'" ~ date ~ "' limit 1"
    ).rows | length -%}
    {%- do lakehouse_patterns.require(
        found == 0,
        relation ~ ' holds ' ~ date ~ ' already, and loading it again would double its rows: '
        ~ 'load the unit again from its first day on'
    ) -%}
{% endmacro %}


{% macro _units_require_commit(target, note) %}
    {%- set history = run_query('describe history ' ~ target.relation) -%}
    {%- do lakehouse_patterns.require(
        note in history.columns['userMetadata'].values(),
        'another run loaded ' ~ target.relation ~ ' meanwhile; let one run at a time load it'
    ) -%}
{% endmacro %}


{% macro _units_load_sql(target, date, batch, note) %}
insert into {{ target.relation }}
with (
    txnAppId = 'lakehouse_patterns.unit_tables',
    txnVersion = '{{ target.version }}',
    userMetadata = '{{ note }}'
)
by name
select
    *,
    date'{{ date }}' as unit_day
from {{ batch }}
{%- endmacro %}
