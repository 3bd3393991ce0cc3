{#- SCD Type 2: the model's columns and the table's, brought together as `on_schema_change` says. -#}

{% macro _scd2_follow_schema(history, relation) %}
    {#-
        Runs before anything is written. The history then has the table's columns in the table's order; what the model
        doesn't select is in `absent` and becomes NULL in new changes.
    -#}
    {%- set stored = lakehouse_patterns.column_types(relation) -%}
    {%- do lakehouse_patterns._scd2_require_own_table(history, relation, stored) -%}
    {%- set changes_type, attributes, given = stored['changes'], {}, {} -%}
    {%- for name in ['effective_to', 'is_current', 'closed_by_delete', 'changes'] -%}
        {%- do stored.pop(name) -%}
    {%- endfor -%}
    {%- do attributes.update(history.tracked) -%}
    {%- do attributes.update(history.untracked) -%}
    {%- do given.update(history.key) -%}
    {%- do given.update({'effective_from': history.changed_at_type}) -%}
    {%- for name, type in attributes.items() -%}
        {#- `ignore` leaves a new column out, as it does in dbt's incremental models. -#}
        {%- if (config.get('on_schema_change') or 'ignore') != 'ignore'
            or lakehouse_patterns.column_name(stored, name) is not none -%}
            {%- do given.update({name: type}) -%}
        {%- endif -%}
    {%- endfor -%}

    {%- set before = lakehouse_patterns._scd2_sorted(history, stored) -%}
    {%- do lakehouse_patterns._scd2_require_own_values(relation, before.absent) -%}
    {%- do lakehouse_patterns._scd2_require_same_changes(history, relation, changes_type, before.untracked) -%}
    {%- set structs = {} -%}
    {%- for name in lakehouse_patterns.names_without_case(history.untracked, stored) if name in given -%}
        {%- do lakehouse_patterns.require(
            before.untracked,
            "'" ~ name ~ "' would be the first untracked column of " ~ relation ~ lakehouse_patterns._scd2_way_out()
        ) -%}
        {%- do structs.update({name: 'changes.element.untracked'}) -%}
    {%- endfor -%}
    {%- do history.update(lakehouse_patterns._scd2_sorted(
        history, lakehouse_patterns.follow_schema(relation, stored, given, structs)
    )) -%}
{% endmacro %}


{% macro _scd2_way_out() %}
    {{ return('; change the model, or rebuild the table from the whole feed with --full-refresh') }}
{% endmacro %}


{% macro _scd2_require_own_table(history, relation, stored) %}
    {%- set key = lakehouse_patterns.spelled_names(stored, history.key) -%}
    {%- for name in key + lakehouse_patterns._scd2_own_columns() -%}
        {%- do lakehouse_patterns.require(
            name in stored,
            relation ~ " has no column '" ~ name ~ "' as an scd2 table of this model has"
            ~ lakehouse_patterns._scd2_way_out()
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro _scd2_require_own_values(relation, absent) %}
    {#- A rebuilt row has all columns of the table: NULL in an absent one, in place of a default or an identity. -#}
    {%- if absent -%}
        {%- set properties = lakehouse_patterns.table_properties(relation) -%}
        {%- for feature in ['allowColumnDefaults', 'identityColumns', 'generatedColumns'] -%}
            {%- do lakehouse_patterns.require(
                'delta.feature.' ~ feature not in properties,
                'the model lacks ' ~ (absent | join(', ')) ~ ', which ' ~ relation ~ ' may fill itself (delta.feature.'
                ~ feature ~ "), and materialized='scd2' writes every column: select a value, NULL where there is none"
            ) -%}
        {%- endfor -%}
    {%- endif -%}
{% endmacro %}


{% macro _scd2_sorted(history, stored) %}
    {#- The table's attributes as {tracked, untracked, absent}. -#}
    {%- set sorted = {'tracked': {}, 'untracked': {}, 'absent': []} -%}
    {%- set attributes = lakehouse_patterns.names_without_case(
        stored, (history.key | list) + lakehouse_patterns._scd2_own_columns()
    ) -%}
    {%- for name in attributes -%}
        {%- set is_tracked = lakehouse_patterns.column_name(history.tracked, name) is not none -%}
        {%- set is_absent = not is_tracked and lakehouse_patterns.column_name(history.untracked, name) is none -%}
        {%- do sorted.absent.append(name) if is_absent -%}
        {%- do sorted[
            'tracked' if is_tracked or (is_absent and history.tracks_all) else 'untracked'
        ].update({name: stored[name]}) -%}
    {%- endfor -%}
    {{ return(sorted) }}
{% endmacro %}


{% macro _scd2_require_same_changes(history, relation, stored_type, untracked) %}
    {#- `changes` has a field for each feed column and for the untracked columns: other options need another type. -#}
    {%- set fields = ['changed_at:' ~ history.changed_at_type] -%}
    {%- do fields.append('sequence:' ~ history.sequence_type) if history.sequence -%}
    {%- do fields.append('is_deleted:boolean') -%}
    {%- if untracked -%}
        {%- set inner = [] -%}
        {%- for name, type in untracked.items() -%}
            {%- do inner.append(name ~ ':' ~ type) -%}
        {%- endfor -%}
        {%- do fields.append('untracked:struct<' ~ (inner | join(',')) ~ '>') -%}
    {%- endif -%}
    {%- set needed = 'array<struct<' ~ (fields | join(',')) ~ '>>' -%}
    {%- do lakehouse_patterns.require(
        stored_type == needed,
        'sequence or tracked_columns differ from those that ' ~ relation ~ ' was built with (changes is '
        ~ stored_type ~ ', the model needs ' ~ needed ~ ')' ~ lakehouse_patterns._scd2_way_out()
    ) -%}
{% endmacro %}
